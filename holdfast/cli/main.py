"""``main``: the tree of commands, and the handling of errors, Ctrl-C, and output that cannot be written.

Exit codes: 0 done, 1 failed, 2 usage, 75 try again, 78 configuration, 130 interrupted, 141 closed pipe.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from holdfast.cli.base import CONTEXT, ExampleGroup, common_options
from holdfast.cli.context import Session
from holdfast.cli.output import as_json
from holdfast.cli.peer_words import explain_option
from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.fault_points import check_environment
from holdfast.core.validation import mask_url
from holdfast.views.formatting import safe_text

INTERRUPTED = 130
READER_GONE = 141

COMMANDS = {
    "worker": "worker.worker",
    "dev": "api.develop",
    "api": "api.api",
    "enqueue": "enqueue.enqueue",
    "run": "run.run",
    "status": "inspect.status",
    "stats": "watch.stats",
    "errors": "error_groups.list_errors",
    "list": "inspect.list_jobs",
    "count": "inspect.count_jobs",
    "show": "inspect.show_job",
    "watch": "watch.watch",
    "why": "why.why",
    "edit": "operations.edit",
    "cancel": "operations.cancel",
    "fork": "operations.fork_job",
    "replay": "operations.replay",
    "delete": "operations.delete",
    "dlq": "operations.dlq",
    "queue": "queue.queue",
    "schedule": "schedule.schedule",
    "limit": "limit.limit",
    "signal": "signal.signal",
    "keys": "keys.keys",
    "encryption": "encryption.encryption_group",
    "audit": "api.audit",
    "config": "config.config",
    "retry-schedule": "config.retry_schedule",
    "import": "import_jobs.import_group",
    "backup": "maintenance.backup",
    "migrate": "maintenance.migrate",
    "doctor": "maintenance.doctor",
    "alerts": "alerts.alerts_group",
    "chaos": "chaos.chaos",
    "completion": "base.print_completion",
}
"""Module and function of each command: a call imports its own."""


class Program(ExampleGroup):
    """Root command: finds commands by their names, and maps every error to a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(".")
        command: click.Command = getattr(import_module(f"holdfast.cli.{module}"), function)
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if args is None:
            gc.freeze()  # Modules live as long as the process: no collection, of which its end has two, visits them.
        try:
            _open_closed_streams()
            _check_words(words)
            code = super().main(words, prog_name or "holdfast", complete_var, standalone_mode=False, **extra)
        except (HoldfastError, click.ClickException) as error:
            _fail(error, words)
        except (click.Abort, KeyboardInterrupt):
            click.echo("holdfast: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            _discard_output()
            text = f"the output cannot be written: {error.strerror}; changes that were made are kept"
            _fail(click.ClickException(text), words)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        check_environment()
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_output()
            return READER_GONE
        return code


def _open_closed_streams() -> None:
    """Opens the null device for standard streams that are closed, so that no other file gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open until the exit
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _discard_output() -> None:
    """Makes the interpreter's flush at exit succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_words(words: Sequence[str]) -> None:
    for index, word in enumerate(words, 1):
        try:
            word.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"argument {index} is not valid UTF-8: {safe_text(word)}") from None


def _fail(error: HoldfastError | click.ClickException, words: Sequence[str]) -> NoReturn:
    """Prints the problem in one line, with ``--json`` also as JSON, and exits."""
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(message, err=True)
        sys.exit(error.exit_code)
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        message = explain_option(error, error.ctx.command_path.split()[1:])
    for url in re.findall(r"[\w+.-]+://.*", "\n".join(words)):  # an argument in a wrong place is repeated, or its head
        head, _, rest = mask_url(url).partition("***")
        if secret := url[len(head) : len(url) - len(rest)]:
            for each in (secret, repr(secret)[1:-1]):
                message = message.replace(f":{each}{rest[:1]}", f":***{rest[:1]}")
            message = f"{head}***".join(re.split(rf"{re.escape(head)}(?!\*\*\*)\S+", message))
    if isinstance(error, click.UsageError) and error.ctx is not None:
        if message == "Missing command." and isinstance(error.ctx.command, click.Group):
            message += f" There are: {', '.join(error.ctx.command.list_commands(error.ctx))}"
        click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Try '{error.ctx.command_path} --help'.", err=True)
    click.echo(f"holdfast: {safe_text(message, lines=True)}", err=True)
    if "--json" in words:
        document: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": error.exit_code}
        if isinstance(error, Invalid):
            document |= {"field": error.field, "remedy": error.remedy}
        click.echo(as_json({"error": document}), err=True)
    sys.exit(error.exit_code)


def _print_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    import sqlite3
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("holdfast")
    except PackageNotFoundError:
        number = "(not installed: running from its source)"
    click.echo(f"holdfast {number}, Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}")
    context.exit()


@click.group("holdfast", cls=Program, context_settings=CONTEXT, params=common_options())
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.pass_context
def main(context: click.Context) -> None:
    """A durable job queue: you give it work, and it never lets go of it.

    The common options may stand before a command's name or after it. They override the environment
    (HOLDFAST_...), which goes before the settings file (holdfast.toml).

    Exit codes: 0 done, 1 failed, 2 usage, 75 try again later, 78 configuration.
    """
    context.ensure_object(Session)
