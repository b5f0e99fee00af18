"""Assertions about enqueued jobs, for sync and async test functions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from holdfast.app import BoundTask, Holdfast
from holdfast.core.errors import HoldfastError
from holdfast.core.models import Job, JobFilter, JobState
from holdfast.core.validation import check_span
from holdfast.stores.common.searches import iterate_jobs
from holdfast.tasks import encode_payload
from holdfast.testing.inline import run_enqueued
from holdfast.testing.transactions import TrackedTransactions, draft_pending

_NEAR = timedelta(seconds=1)  # tolerance of instants: a test computes them a little earlier
_SHOWN = 10  # jobs in a failure


def enqueued(
    app: Holdfast,
    *,
    task: str | BoundTask[..., Any, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    queue: str | None = None,
    delay: float | timedelta | str | None = None,
    run_at: datetime | None = None,
    key: str | None = None,
    priority: int | None = None,
    tag: str | None = None,
) -> list[Job]:
    """Returns the enqueued jobs that match, oldest first, in any state.

    args: some of the arguments; nested objects are compared in the same way. delay: seconds, a timedelta or text, from
    the creation; run_at: an instant; both to the second. Works in async tests without await. HoldfastError unless the
    application is under test. AssertionError if a job that matches waits for the commit of a Django transaction:
    no store has it yet.
    """
    if not app.under_test:
        raise HoldfastError(
            "this application is not under test: its jobs are real; wrap the test in testing.manual(app), "
            "testing.inline(app) or a testing.Harness(app)"
        )
    wanted = None if args is None else json.loads(encode_payload(args))
    name = task.name if isinstance(task, BoundTask) else task
    span = None if delay is None else check_span(delay, "delay")

    def is_match(job: Job) -> bool:
        return (
            name in (None, job.task)
            and queue in (None, job.queue)
            and key in (None, job.key)
            and priority in (None, job.priority)
            and (tag is None or tag in job.options_or_default.tags)
            and (span is None or abs(job.run_at - job.created_at - span) <= _NEAR)
            and (run_at is None or abs(job.run_at - run_at) <= _NEAR)
            and (wanted is None or _includes(json.loads(job.payload), wanted))
        )

    if any(is_match(draft_pending(app, job)) for job in app._waiting_jobs()):
        raise AssertionError(_overview(app))
    return [job for job in _known_jobs(app) if is_match(job)]


def assert_enqueued(app: Holdfast, *, count: int | None = None, **match: Any) -> list[Job]:
    """Fails unless at least one job, or exactly ``count``, was enqueued; returns the jobs.

    Further arguments as in ``enqueued``. The failure shows the enqueued jobs.
    """
    found = enqueued(app, **match)
    if found if count is None else len(found) == count:
        return found
    number = "a job" if count is None else f"{count} {'job' if count == 1 else 'jobs'}"
    raise AssertionError(f"expected {number} with {_described(match)}, found {len(found)}.\n{_overview(app)}")


def refute_enqueued(app: Holdfast, **match: Any) -> None:
    """Fails if a job that matches was enqueued. Arguments as in ``enqueued``."""
    if found := enqueued(app, **match):
        raise AssertionError(f"expected no job with {_described(match)}, found {len(found)}.\n{_overview(app)}")


def _described(match: Mapping[str, Any]) -> str:
    shown = {name: value.name if isinstance(value, BoundTask) else value for name, value in match.items()}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items()) or "any task"


def _overview(app: Holdfast) -> str:
    jobs = _known_jobs(app)
    if not jobs:
        return f"Nothing was enqueued.{app._waiting_jobs_hint()}"
    more = [f"  and {len(jobs) - _SHOWN} more"] if len(jobs) > _SHOWN else []
    return "\n".join([f"What was enqueued:{app._waiting_jobs_hint()}", *map(_line, jobs[:_SHOWN]), *more])


def _line(job: Job) -> str:
    extras = [
        f"queue={job.queue}",
        f"priority={job.priority}" if job.priority else "",
        f"key={job.key!r}" if job.key else "",
    ]
    if job.state is JobState.SCHEDULED:
        extras.append(f"delay={job.run_at - job.created_at}")
    return f"  {job.task} {job.payload} {' '.join(filter(None, extras))} ({job.state})"


def _includes(whole: Any, part: Any) -> bool:
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(name in whole and _includes(whole[name], value) for name, value in part.items())
    return bool(whole == part) and isinstance(whole, bool) == isinstance(part, bool)


def _known_jobs(app: Holdfast) -> list[Job]:
    """Returns the jobs of the store, then those of open transactions."""
    stored = _all_jobs(app)
    if not isinstance(app.external_tx, TrackedTransactions):
        return stored
    ids = {job.id for job in stored}
    return [*stored, *(job for job in app.external_tx.find_pending() if job.id not in ids)]


def _all_jobs(app: Holdfast) -> list[Job]:
    """Returns all jobs, oldest first; reads them in another thread if an event loop runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return app.run_blocking(_read(app))
    found: list[Job] = []
    reading = threading.Thread(target=lambda: found.extend(app.run_blocking(_read(app))), name="holdfast-test-read")
    reading.start()
    reading.join()
    return found


async def _read(app: Holdfast) -> list[Job]:
    jobs = [job async for job in iterate_jobs(await app.open_store(), JobFilter())]
    return jobs[::-1]


class EnqueuedJobs:
    """The jobs that a test has enqueued in an application under test: ``len(jobs)``, ``for job in jobs``."""

    def __init__(self, app: Holdfast) -> None:
        self.app = app

    def __len__(self) -> int:
        return len(enqueued(self.app))

    def __iter__(self) -> Iterator[Job]:
        return iter(enqueued(self.app))

    def find(self, **match: Any) -> list[Job]:
        """Returns the jobs that match, oldest first. Arguments as in ``enqueued``."""
        return enqueued(self.app, **match)

    def assert_enqueued(self, *, count: int | None = None, **match: Any) -> list[Job]:
        """Fails unless at least one job, or exactly ``count``, was enqueued; returns the jobs."""
        return assert_enqueued(self.app, count=count, **match)

    def refute_enqueued(self, **match: Any) -> None:
        """Fails if a job that matches was enqueued."""
        refute_enqueued(self.app, **match)

    async def run(self) -> None:
        """Runs the jobs that are ready, once: ``testing.run_enqueued``."""
        await run_enqueued(self.app)
