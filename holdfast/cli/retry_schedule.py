"""``retry-schedule``: the delays of a policy."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from holdfast import Retry
from holdfast.cli.base import add_command, task_names
from holdfast.cli.context import Session
from holdfast.cli.output import Column, print_json, print_note, print_table
from holdfast.core.errors import NotFound
from holdfast.core.validation import did_you_mean
from holdfast.views.formatting import format_span

_COLUMNS = [
    Column("FAILURE", "number"),
    Column("NOMINAL", "number"),
    Column("LEAST", "number"),
    Column("MOST", "number"),
    Column("IN ALL", "number", spare=True),
]
_SHOWN = 10  # failures, where attempts are unlimited


@add_command(
    "retry-schedule",
    examples=[
        "holdfast retry-schedule",
        "holdfast retry-schedule exponential:base=5,factor=3,cap=300 --attempts 8",
        "holdfast retry-schedule 1,5,25,125",
    ],
)
@click.argument("policy", required=False)
@click.option("--attempts", type=click.IntRange(1, 10_000), metavar="N", help="Attempts the job may have.")
@click.option(
    "--task",
    metavar="NAME",
    shell_complete=task_names,
    help="The policy and the attempts of this task of the application.",
)
@click.pass_obj
def retry_schedule(session: Session, *, policy: str | None, attempts: int | None, task: str | None) -> None:
    """Print how long a retry policy waits after each failure.

    The waits are nominal, least and most. POLICY is exponential, exponential:base=5,factor=2 and so on, immediate,
    fixed:SPAN, or the delays with commas between. Without one: the policy of the settings.
    """
    if policy is not None and task is not None:
        raise click.UsageError("give a policy or --task, not both")
    retry, budget = _of_task(session, task) if task is not None else _of_settings(session, policy)
    count = attempts or budget or _SHOWN + 1
    rows = _rows(retry, count)
    if session.json:
        print_json({"policy": str(retry), "attempts": attempts or budget, "delays": rows})
        return
    print_note(f"{retry}, {attempts or budget or 'unlimited'} attempts")
    cells = [
        [row["failure"], *(format_span(row[name]) for name in ("nominal", "least", "most", "in_all"))] for row in rows
    ]
    print_table(_COLUMNS, cells, empty="one attempt, no retry")


def _rows(retry: Retry, attempts: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    in_all = 0.0
    for failure, nominal in enumerate(retry.schedule(attempts), 1):
        least, most = retry.delay_bounds(failure)
        in_all += nominal.total_seconds()
        rows.append(
            {
                "failure": failure,
                "nominal": nominal.total_seconds(),
                "least": least.total_seconds(),
                "most": most.total_seconds(),
                "in_all": in_all,
            }
        )
    return rows


def _of_settings(session: Session, policy: str | None) -> tuple[Retry, int | None]:
    settings = session.settings()
    return settings.retry if policy is None else Retry.parse(policy), settings.max_attempts


def _of_task(session: Session, name: str) -> tuple[Retry, int | None]:
    app = session.with_tasks("--task")
    registered = app.registry.get(name)
    if registered is None:
        raise NotFound(f"the application has no task {name!r}{did_you_mean(name, app.registry.task_names())}")
    own = registered.max_attempts
    budget = app.settings.max_attempts if isinstance(own, msgspec.UnsetType) else own
    return registered.retry or app.settings.retry, budget
