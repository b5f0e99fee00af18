"""Commands and options of a peer's command line, with what to write here. A peer is another queue: here, Celery."""

from __future__ import annotations

from collections.abc import Sequence

import click

_COMMANDS = {
    "beat": "every worker runs the schedules: holdfast worker start",
    "call": "to submit a job: holdfast enqueue TASK",
    "control": "holdfast worker stop; holdfast queue pause; holdfast cancel ID",
    "events": "to see what goes on: holdfast watch",
    "flower": "the console is part of the API: holdfast api",
    "inspect": "holdfast worker list; holdfast list --state running; holdfast status",
    "multi": "holdfast worker start --processes N, under the service manager of the system",
    **dict.fromkeys(("flush", "purge", "queue: delete"), "holdfast queue purge NAME"),
    "result": "holdfast show ID",
    "retry": "holdfast replay ID",
    "revoke": "holdfast cancel ID",
    "holdfast: start": "holdfast worker start",
    "shell": "start python and import the application: its methods block behind .sync",
}
_WORKER_OPTIONS = {
    **dict.fromkeys(("-l", "--loglevel"), "It is a setting: HOLDFAST_LOG_LEVEL=INFO, or log_level in holdfast.toml."),
    **dict.fromkeys(("-n", "--hostname"), "It is a setting: HOLDFAST_WORKER_ID=…, or worker_id in holdfast.toml."),
    **dict.fromkeys(("-B", "--beat"), "Leave it out: every worker runs the schedules."),
    **dict.fromkeys(("-P", "--pool"), 'Each task has its own: async def, def (threads), or executor="process".'),
    "--autoscale": "The numbers are fixed: --processes N --concurrency N.",
    "--max-memory-per-child": "It is a setting: HOLDFAST_RECYCLE_MEMORY=…, or recycle_memory in holdfast.toml.",
    "--max-tasks-per-child": "It is a setting: HOLDFAST_RECYCLE_JOBS=…, or recycle_jobs in holdfast.toml.",
}
_OPTIONS = {
    ("cancel", "--terminate"): "Leave it out: a job that runs is asked to stop.",
    ("enqueue", "--countdown"): "Write --delay SPAN.",
    ("enqueue", "--eta"): "Write --run-at INSTANT.",
    ("import celery", "--broker"): "Give the URL of the broker as the argument.",
    ("import celery", "-b"): "Give the URL of the broker as the argument.",
    ("queue purge", "--force"): "Leave it out: nothing is asked.",
    ("worker stop", "--hostname"): "Name the worker as the argument; holdfast worker list shows them.",
}


def explain_command(word: str, group: str | None) -> str:
    """Returns ``; …`` with what to write here for a command of Celery, or a misnamed one of the group, else ``""``."""
    hint = _COMMANDS.get(f"{group}: {word}") or _COMMANDS.get(word)
    return f"; {hint}" if hint else ""


def explain_option(error: click.NoSuchOption, command: Sequence[str]) -> str:
    """Returns the message of an unknown option of a command, with what to write here."""
    message = error.format_message()
    if list(command) == ["run"]:
        return f"{message} If it is the program's, put -- before the program: holdfast run -- PROGRAM ..."
    remedy = _OPTIONS.get((" ".join(command), error.option_name))
    if remedy is not None:
        return f"{error.message} {remedy}"
    if list(command[:1]) != ["worker"]:
        return message
    if error.option_name in _WORKER_OPTIONS:
        message = f"{error.message} {_WORKER_OPTIONS[error.option_name]}"
    return message if len(command) > 1 else f"{message} To run a worker, write: holdfast worker start ..."
