"""The tables at the end of the story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast import Job, JobState

ENDED = (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED)
YES, NO = "[green]✓[/]", "[red]✗[/]"


@dataclass(frozen=True)
class Figures:
    """Numbers from the gateway's client, the databases and the provider."""

    accepted: Mapping[str, int]
    """Jobs for which a client got an answer, by service."""
    states: Mapping[str, Mapping[str, int]]
    """Jobs by service and state."""
    users: int
    accounts: int
    deliveries: int
    messages: int
    """Messages that the provider has accepted, each key once."""
    calls: Sequence[Mapping[str, Any]]
    """The provider's log."""


def print_attempts(console: Console, job: Job, attempts: Sequence[Any]) -> None:
    """Prints the failed attempts of a job, and when each was followed by the next one."""
    table = Table()
    for column in ("attempt", "error", "next attempt after"):
        table.add_column(column)
    starts = [attempt.started_at_us for attempt in attempts[1:]] + [job.started_at_us]
    for attempt, following in zip(attempts, starts, strict=True):
        delay = (following - attempt.ended_at_us) / 1_000_000
        table.add_row(str(attempt.attempt), (attempt.error or "").partition(": ")[2], f"{delay:.1f} s")
    console.print(table)


def print_report(console: Console, figures: Figures) -> bool:
    """Prints the tables. Returns True if every promise was kept."""
    console.print(jobs_table(figures))
    promises = list_promises(figures)
    table = Table(title="Effects: each exactly once", title_justify="left")
    for column in ("promise", "left", "right", ""):
        table.add_column(column, justify="left" if column == "promise" else "right")
    for promise, left, right in promises:
        table.add_row(promise, str(left), str(right), YES if left == right else NO)
    console.print(table)
    answers = Counter(call["status"] for call in figures.calls)
    console.print(
        "Calls in the provider's log: " + ", ".join(f"{n} answered {status}" for status, n in answers.items())
    )
    return all(left == right for _, left, right in promises)


def jobs_table(figures: Figures) -> Table:
    """Returns the table of jobs by service."""
    table = Table(title="Jobs", title_justify="left")
    for column in ("service", "accepted", "succeeded", "dead", "cancelled", "unfinished"):
        table.add_column(column, justify="left" if column == "service" else "right")
    for service, states in figures.states.items():
        ended = [states[state] for state in ENDED]
        unfinished = sum(states.values()) - sum(ended)
        table.add_row(service, str(accepted_by(figures, service)), *map(str, ended), str(unfinished))
    return table


def accepted_by(figures: Figures, service: str) -> int:
    """Returns the number of accepted jobs. `notifications` has also accepted one from each user that was created."""
    welcomes = figures.states["users"][JobState.SUCCEEDED] if service == "notifications" else 0
    return figures.accepted[service] + welcomes


def list_promises(figures: Figures) -> list[tuple[str, int, int]]:
    """Returns promises as two numbers that must be equal."""
    promises = [
        (
            f"{service}: accepted = succeeded + dead + cancelled",
            accepted_by(figures, service),
            sum(states[state] for state in ENDED),
        )
        for service, states in figures.states.items()
    ]
    succeeded = {service: states[JobState.SUCCEEDED] for service, states in figures.states.items()}
    limited = sum(call["status"] == 429 for call in figures.calls)
    return [
        *promises,
        ("users: succeeded jobs = active users in the database", succeeded["users"], figures.users),
        ("users: users = accounts", figures.users, figures.accounts),
        ("notifications: succeeded jobs = deliveries in the database", succeeded["notifications"], figures.deliveries),
        ("deliveries = messages that the provider has accepted", figures.deliveries, figures.messages),
        ("calls that exceeded the provider's own limit", limited, 0),
    ]
