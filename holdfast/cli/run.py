"""``run``: a command as a job."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click

from holdfast import Holdfast
from holdfast.cli.base import add_command
from holdfast.cli.context import Session
from holdfast.cli.output import print_json
from holdfast.cli.submission import (
    await_end,
    job_options,
    parse_options,
    print_submitted,
    read_input,
    submit_one,
    wait_options,
)
from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.models import Job, JobState
from holdfast.tasks.command_policy import COMMAND, draft_command
from holdfast.views.documents import job_document, to_builtins
from holdfast.views.formatting import safe_text

_RESOURCES = {
    "memory": "memory",
    "cpu": "cpu",
    "open_files": "open_files",
    "file_size": "file_size",
    "processes": "max_processes",
}
"""Option of each resource."""


@add_command(
    "run",
    examples=[
        "holdfast run -- gzip -k access.log",
        "holdfast run --timeout 10m --max-attempts 3 --wait -- ./nightly.sh --full",
        "holdfast run --shell 'sort names.txt | uniq > unique.txt'",
        "holdfast run --memory 512M --cpu 60 --sandbox strict -- ./convert photo.raw",
    ],
)
@click.argument("words", metavar="[--] PROGRAM [ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--shell", metavar="TEXT", help="A line for /bin/sh instead; only where the setting commands is shell.")
@click.option("--stdin", metavar="-", type=click.Choice(["-"]), help="Keep what stdin holds as the command's input.")
@click.option("--cwd", metavar="DIRECTORY", help="Where it runs: an absolute path [the worker's directory].")
@click.option("--env", "variables", metavar="NAME=TEXT", multiple=True, help="A variable of its environment.")
@click.option("--retry-code", "retry_codes", type=int, multiple=True, metavar="N", help="Retry these exit codes only.")
@click.option("--dead-code", "dead_codes", type=int, multiple=True, metavar="N", help="Never retry these exit codes.")
@click.option("--memory", metavar="SIZE", help="The most memory its processes may use together: 512M.")
@click.option("--cpu", metavar="SPAN", help="The most CPU time its processes may use together: 60, 5m.")
@click.option("--open-files", metavar="N", help="The most files that one of its processes may have open.")
@click.option("--file-size", metavar="SIZE", help="The largest file that it may write: 1G.")
@click.option("--max-processes", metavar="N", help="The most processes that it may have at once.")
@click.option("--sandbox", metavar="NAME", help="strict: it writes in its own directory only, without the network.")
@click.option("--network", is_flag=True, help="It needs the network in its sandbox.")
@job_options
@wait_options
@click.pass_obj
def run(
    session: Session,
    /,
    *,
    words: tuple[str, ...],
    options: dict[str, Any],
    wait: bool,
    wait_for: str | None,
    **given: Any,
) -> int:
    """Submit a program with its arguments as a job.

    No shell reads the arguments; a timeout kills all of its processes. Workers run commands only where the settings
    enable them. With --wait its output is printed and its exit code is this program's.
    """
    if bool(words) == (given["shell"] is not None):
        raise click.UsageError("give a program with its arguments after --, or --shell TEXT")
    with session.open_target(creating=True) as app:
        _check_enabled(app, shell=given["shell"] is not None)
        job = app.draft_job(COMMAND, _payload(app, words, given), **parse_options(options))
        handle = submit_one(app, job)
        if not wait and wait_for is None:
            print_submitted(session, app, job, handle)
            return 0
        ended = await_end(app, handle, wait_for)
        if session.json:
            print_json(to_builtins(job_document(ended)) | {"created": handle.created})
        else:
            _print_output(ended)
        return exit_code(ended)


def _check_enabled(app: Holdfast, *, shell: bool) -> None:
    mode = app.settings.commands
    if mode == "off" or (shell and mode != "shell"):
        wanted = "shell" if shell else "argv"
        what = "Shell lines" if shell else "Command jobs"
        source = app.settings.source_of("commands")
        raise ConfigError(
            f"{what} are off here (commands = {mode}, from {source}): a client that can submit them "
            f"runs programs as the worker's user. To enable them: `holdfast config set commands {wanted}`, or "
            f"HOLDFAST_COMMANDS={wanted}, for the submitter and its workers; `command_allow` limits which programs"
        )


def _payload(app: Holdfast, words: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    payload: dict[str, Any] = {"shell": given["shell"]} if given["shell"] is not None else {"argv": list(words)}
    payload |= {name: given[name] for name in ("cwd", "retry_codes", "dead_codes", "sandbox", "network") if given[name]}
    payload["resources"] = {name: given[option] for name, option in _RESOURCES.items() if given[option] is not None}
    for name in ("retry_codes", "dead_codes"):
        if name in payload:
            payload[name] = list(payload[name])
    if given["variables"]:
        payload["env"] = dict(_variable(each) for each in given["variables"])
    if given["stdin"]:
        payload["stdin"] = _text(read_input(app.settings.payload_limit))
    return draft_command({name: value for name, value in payload.items() if value != {}})


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise Invalid("env", text, "write NAME=TEXT")
    return name, value


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Invalid("stdin", f"byte {error.start + 1}", "a command's kept input is UTF-8 text") from None


def _print_output(job: Job) -> None:
    """Prints the command's output; on a terminal without control characters."""
    if job.result is None:
        return
    result = json.loads(job.result)
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        text = result[name]
        click.echo(safe_text(text, lines=True) if stream.isatty() else text, nl=False, err=name == "stderr")


def exit_code(job: Job) -> int:
    """Returns the exit code: 0, the command's own if the job has it, or 1."""
    if job.state is JobState.SUCCEEDED:
        return 0
    found = re.match(r"exit code (\d{1,3})\b", job.error or "")
    return int(found[1]) if found and 0 < int(found[1]) < 256 else 1
