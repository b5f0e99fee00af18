"""Dependencies: jobs that start when others have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from holdfast.core.errors import Invalid

NEVER_US = 253_402_300_799_000_000
"""``run_at`` of a job that waits without a deadline: the end of the year 9999."""


class Condition(StrEnum):
    """The end of a job for which another one waits."""

    SUCCESS = "success"  # it succeeds; if it is dead or cancelled, the other one is cancelled
    FAILURE = "failure"  # it is dead or cancelled; if it succeeds, the other one is cancelled
    END = "end"  # any


class Dependency(msgspec.Struct, frozen=True, gc=False):
    """A job that another one waits for before it starts. ``on``: a `Condition`, or its text."""

    job_id: str
    on: str = Condition.SUCCESS


class DependencyState(StrEnum):
    """State of a dependency."""

    OPEN = "open"  # the job has not ended
    MET = "met"  # it ended as it should; or it is a child for which the other one waits no more
    FAILED = "failed"  # the job ended otherwise than it should


class DependencyInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A dependency as it is stored. ``is_child``: the waiting job has started the other one, and waits for its end."""

    job_id: str
    on: Condition
    state: DependencyState
    is_child: bool


def missing_dependency(job_id: str) -> Invalid:
    """Error for a job that waits for this one, which is not stored."""
    return Invalid("after", job_id, "give jobs that are stored, or earlier in the same submission")


def describe_failed_dependency(job_id: str, state: str) -> str:
    """Text for a job that was cancelled because of a dependency. ``state``: how that one ended, or "deleted"."""
    return f"job {job_id}, for which it waited, is {state}"


def find_cycle(dependencies: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns jobs that wait for each other in a circle, the first one at the end again; empty if there are none.

    ``dependencies``: the jobs that each job waits for.
    """
    done: set[str] = set()
    for start in dependencies:
        path = [start]  # no recursion: a chain may have many thousands
        on_path = {start: iter(dependencies[start])}
        while path:
            other = next(on_path[path[-1]], None)
            if other is None:
                del on_path[path[-1]]
                done.add(path.pop())
            elif other in on_path:
                return [*path[path.index(other) :], other]
            elif other not in done and other in dependencies:
                path.append(other)
                on_path[other] = iter(dependencies[other])
    return []
