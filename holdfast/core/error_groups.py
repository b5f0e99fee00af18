"""Groups of errors: failures with the same cause, whatever ids and numbers their messages contain. Pure.

A group's id is a digest of the first line of the error, with a sign in place of each word that contains a digit and of
each e-mail address, and of the place in the code that raised it. A store keeps the id with the error text of a job.
Stores end some jobs themselves: those are in the groups ``batch`` (members have failed) and ``unreadable``.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from holdfast.core.errors import Invalid

MAX_READ = 10_000
"""Greatest number of jobs in each state that are grouped: the latest."""

GROUP_PATTERN = "^(?:[0-9a-f]{12}|batch|unreadable)$"
"""Ids of groups, as a regular expression."""

_HOUR_US = 3_600_000_000
_MAX_LINE = 200
_WORD = re.compile(r"([\w.+-]++@[\w.-]+|[^\W\d]*+(?:[.-]++[^\W\d]*+)*+\d[\w.-]*)|[\w.-]+")
"""A word; group 1 is a word that varies: an e-mail address, or one with a digit. A long word takes linear time."""
_FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line \d+, in ([^\n]+)$', re.MULTILINE)
_LIBRARY = re.compile(r"[\\/](?:site-packages|dist-packages|lib[\\/]python3[^\\/]*)[\\/]|^<frozen ")
_SEPARATOR = re.compile(r"[\\/]")


class FailedJob(msgspec.Struct, frozen=True, gc=False):
    """A job that is dead, or waits for its next attempt, and the instant at which its latest attempt failed."""

    job_id: str
    queue: str
    task: str
    group: str
    is_dead: bool
    at_us: int


class ErrorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that failed with the same error."""

    id: str
    dead: int
    retrying: int
    """Number of jobs that wait for their next attempt."""
    first_us: int
    last_us: int
    """Instants of the earliest and the latest of these failures."""
    tasks: tuple[str, ...]
    queues: tuple[str, ...]
    """Names in order of their numbers of jobs."""
    latest: str
    """Id of the job that failed last."""
    hours: tuple[tuple[int, int], ...]
    """Start of each hour with failures, in microseconds, and their number; the earliest first."""


def identify_group(error: str, traceback: str | None) -> str:
    """Returns the id of the group to which an error belongs."""
    line = error.lstrip().partition("\n")[0]
    line = _WORD.sub(lambda word: "#" if word[1] else word[0], line[: 2 * _MAX_LINE])[:_MAX_LINE]
    subject = f"{line}\n{find_place(traceback) or ''}"
    return hashlib.blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def check_error_group(given: object, field: str = "error_group") -> str:
    """Returns the id of a group; Invalid for anything else."""
    if not isinstance(given, str) or not re.fullmatch(GROUP_PATTERN, given):
        raise Invalid(field, given, "give an id that `holdfast errors` lists, of 12 hexadecimal digits")
    return given


def find_place(traceback: str | None) -> str | None:
    """Returns the place that raised an error, as ``app/mail.py in send``: the innermost frame outside libraries.

    None for a text without frames. The number of the line is left out: it changes with each edit of the file.
    """
    frames = _FRAME.findall((traceback or "").rpartition("Traceback (most recent call last):")[2])
    if not frames:
        return None
    path, function = next((each for each in reversed(frames) if not _LIBRARY.search(each[0])), frames[-1])
    return f"{'/'.join(_SEPARATOR.split(path)[-2:])} in {function.strip()}"


def group_failed_jobs(
    jobs: Sequence[FailedJob], allows: Callable[[str], bool] = lambda queue: True
) -> list[ErrorGroup]:
    """Returns the groups of the jobs of allowed queues, the one with the latest failure first."""
    allowed = {queue for queue in {job.queue for job in jobs} if allows(queue)}
    members: dict[str, list[FailedJob]] = {}
    for job in jobs:
        if job.queue in allowed:
            members.setdefault(job.group, []).append(job)
    groups = [_summarize(group, found) for group, found in members.items()]
    return sorted(groups, key=lambda each: (-each.last_us, each.id))


def _summarize(group: str, jobs: list[FailedJob]) -> ErrorGroup:
    latest = max(jobs, key=lambda job: (job.at_us, job.job_id))
    dead = sum(job.is_dead for job in jobs)
    return ErrorGroup(
        id=group,
        dead=dead,
        retrying=len(jobs) - dead,
        first_us=min(job.at_us for job in jobs),
        last_us=latest.at_us,
        tasks=_most_frequent(job.task for job in jobs),
        queues=_most_frequent(job.queue for job in jobs),
        latest=latest.job_id,
        hours=tuple(sorted(Counter(job.at_us - job.at_us % _HOUR_US for job in jobs).items())),
    )


def _most_frequent(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in sorted(Counter(names).items(), key=lambda each: (-each[1], each[0])))
