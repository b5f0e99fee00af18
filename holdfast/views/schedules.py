"""Documents of schedules, for CLI and HTTP API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from holdfast.app.schedules import upcoming_runs
from holdfast.core.models import Job
from holdfast.core.redaction import Redaction
from holdfast.core.schedule import Overlap, Schedule
from holdfast.views.documents import ID, Instant, QueueName, TaskName, raw_json
from holdfast.views.formatting import format_timestamp

SHOWN_RUNS = 5
"""Number of next runs in a document."""

LocalInstant = Annotated[
    str,
    Meta(
        description="RFC 3339, with the offset of the schedule's zone.",
        examples=["2030-01-31T03:00:00+01:00"],
        extra_json_schema={"format": "date-time"},
    ),
]
ScheduleName = Annotated[str, Meta(description="The schedule's name.", examples=["nightly-report"])]


class ScheduleDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A recurring job."""

    name: ScheduleName
    task: TaskName
    queue: QueueName
    payload: Annotated[Raw, Meta(description="The arguments of each job by name.", examples=[{"team": "all"}])]
    cron: Annotated[str | None, Meta(description="Minute, hour, day, month, weekday.", examples=["0 3 * * *"])]
    zone: Annotated[str, Meta(description="The IANA time zone of cron.", examples=["Europe/Zurich"])]
    every: Annotated[float | None, Meta(description="The interval in seconds.")]
    at: Annotated[Instant | None, Meta(description="The instant of a schedule that runs once.")]
    catch_up: Annotated[int, Meta(description="Missed runs that are made up for, the latest ones.", ge=0)]
    overlap: Annotated[Overlap, Meta(description="What a run does while the job of the one before has not ended.")]
    jitter: Annotated[float, Meta(description="Seconds by which a run may start later.", ge=0)]
    max_runs: Annotated[int | None, Meta(description="Runs after which it ends; null: no limit.")]
    owner: Annotated[str | None, Meta(description="The application whose code declares it; null: an operator made it.")]
    state: Annotated[
        Literal["active", "paused", "ended"], Meta(title="ScheduleState", description="Whether it has a next run.")
    ]
    next_run: LocalInstant | None
    next_runs: Annotated[list[LocalInstant], Meta(description="The next runs, at most five.")]
    last_run: Annotated[Instant | None, Meta(description="The latest run whose job was submitted.")]
    last_job: Annotated[str | None, Meta(description="The id of that job.")]
    runs: Annotated[int, Meta(description="Jobs it has submitted.", ge=0)]
    missed: Annotated[int, Meta(description="Runs left out because they were too late.", ge=0)]
    skipped: Annotated[int, Meta(description="Runs left out because of `overlap`.", ge=0)]
    revision: Annotated[int, Meta(description="Grows with each change.", ge=0)]


def schedule_state(schedule: Schedule) -> Literal["active", "paused", "ended"]:
    """Returns the state of a schedule; ``ended``: it has no further run."""
    return "paused" if schedule.paused else "ended" if schedule.next_us is None else "active"


def schedule_document(schedule: Schedule, redaction: Redaction) -> ScheduleDocument:
    """Returns the document of a schedule; hidden fields of its payload are replaced."""
    upcoming = [each.isoformat() for each in upcoming_runs(schedule, SHOWN_RUNS)]
    return ScheduleDocument(
        name=schedule.name,
        task=schedule.job.task,
        queue=schedule.job.queue,
        payload=raw_json(redaction.redact_job(_as_job(schedule)).payload),
        cron=schedule.cron,
        zone=schedule.zone,
        every=None if schedule.every_us is None else schedule.every_us / 1e6,
        at=None if schedule.at_us is None else format_timestamp(schedule.at_us),
        catch_up=schedule.catch_up,
        overlap=schedule.overlap,
        jitter=schedule.jitter_us / 1e6,
        max_runs=schedule.max_runs,
        owner=schedule.owner,
        state=schedule_state(schedule),
        next_run=upcoming[0] if upcoming else None,
        next_runs=upcoming,
        last_run=None if schedule.last_us is None else format_timestamp(schedule.last_us),
        last_job=schedule.last_job,
        runs=schedule.runs,
        missed=schedule.missed,
        skipped=schedule.skipped,
        revision=schedule.revision,
    )


def _as_job(schedule: Schedule) -> Job:
    """Returns a job of the schedule, in the form that redaction takes."""
    template = schedule.job
    return Job(
        id="",
        task=template.task,
        queue=template.queue,
        payload=template.payload,
        claims=0,
        attempts=0,
        max_attempts=template.max_attempts,
        priority=template.priority,
        lost_leases=0,
        run_at_us=0,
        created_at_us=0,
    )


SCHEDULE: dict[str, Any] = {
    "name": "nightly-report",
    "task": "report.send",
    "queue": "default",
    "payload": {"team": "all"},
    "cron": "0 3 * * *",
    "zone": "Europe/Zurich",
    "every": None,
    "at": None,
    "catch_up": 1,
    "overlap": "skip",
    "jitter": 0.0,
    "max_runs": None,
    "owner": None,
    "state": "active",
    "next_run": "2030-01-31T03:00:00+01:00",
    "next_runs": ["2030-01-31T03:00:00+01:00", "2030-02-01T03:00:00+01:00"],
    "last_run": "2030-01-30T02:00:00.000000Z",
    "last_job": ID,
    "runs": 30,
    "missed": 0,
    "skipped": 1,
    "revision": 1_896_048_000_000_031,
}
"""Schedule in examples."""
