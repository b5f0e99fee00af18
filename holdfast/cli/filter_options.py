"""Which jobs a command is for: ids and filters, and operations on all that match."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import click

from holdfast import Holdfast, JobFilter, JobState
from holdfast.cli.shell_completion import task_names
from holdfast.core.models import BulkResult, Reason
from holdfast.views.filters import Filters

F = TypeVar("F", bound=Callable[..., Any])

Operation = Callable[[JobFilter], BulkResult]


def server_time_us(app: Holdfast) -> int:
    """The store's clock."""

    async def ask_limit() -> int:
        return await (await app.open_store()).health.server_time_us()

    return app.run_blocking(ask_limit())


def filter_options(*, states: bool = True) -> Callable[[F], F]:
    """The filter options; the command gets them as ``filters``."""
    names = [state.value for state in JobState]
    options = [
        click.option("--queue", "-Q", metavar="NAME", help="Jobs of this queue."),
        click.option(
            "--task",
            metavar="NAME",
            multiple=True,
            shell_complete=task_names,
            help="Jobs of this task; several: of any of them.",
        ),
        click.option("--tag", metavar="TEXT", help="Jobs that carry this tag."),
        click.option(
            "--reason",
            type=click.Choice([reason.value for reason in Reason]),
            metavar="REASON",
            help="Jobs that failed for this reason: " + ", ".join(reason.value for reason in Reason) + ".",
        ),
        click.option("--worker", metavar="ID", help="Jobs this worker took last."),
        click.option("--error", metavar="TEXT", help="Jobs whose error contains this text."),
        click.option("--since", metavar="WHEN", help="Submitted after: an instant, or how long ago (2h)."),
        click.option("--until", metavar="WHEN", help="Submitted before: an instant, or how long ago (7d)."),
    ]
    if states:
        text = f"Jobs in this state; several: in any of them. {', '.join(names)}."
        options.insert(0, click.option("--state", type=click.Choice(names), metavar="STATE", multiple=True, help=text))

    def add_options(function: F) -> F:
        @functools.wraps(function)
        def collect_filters(*args: Any, **said: Any) -> Any:
            fields = {name: said.pop(name) for name in Filters.__struct_fields__ if name in said}
            return function(*args, filters=Filters(**fields), **said)

        decorated: Any = collect_filters
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]  # click's decorators hand the function through

    return add_options


def check_choice(ids: tuple[str, ...], filters: Filters, everything: bool) -> None:
    """Ids, filters or ``--all``: exactly one way to say which jobs."""
    ways = [bool(ids), filters.given or everything]
    if sum(ways) == 2:
        raise click.UsageError("give ids or filters, not both")
    if not any(ways):
        raise click.UsageError("say which jobs: ids, filters such as --queue mail, or --all")


def operate_on_all(operation: Operation, filters: list[JobFilter]) -> BulkResult:
    """Repeat a bounded operation until nothing that matches one of the filters is left."""
    changed: dict[str, JobState] = {}
    for where in filters:
        while True:
            answer = operation(where)
            fresh = {job_id: state for job_id, state in answer.changed if job_id not in changed}
            changed |= fresh
            # What is only asked to stop still matches: without anything new there is nothing left to ask.
            if not answer.more or not fresh:
                break
    return BulkResult(changed=list(changed.items()), refused=[])


def time_ago(us: int | None, now: int) -> timedelta | None:
    """How long ago an instant was."""
    return None if us is None else timedelta(microseconds=now - us)
