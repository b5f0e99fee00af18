"""Jobs as QueueCTL writes them: what a submission may say, and a job with QueueCTL's states and columns."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import msgspec

from holdfast import Holdfast, Invalid, Job, JobState, NotFound
from holdfast.core.dependencies import NEVER_US
from holdfast.core.ids import new_id
from holdfast.core.models import NewJob
from holdfast.tasks.command_policy import COMMAND

STATES: Mapping[str, tuple[JobState, ...]] = MappingProxyType(
    {
        "pending": (JobState.SCHEDULED, JobState.WAITING, JobState.QUEUED),
        "processing": (JobState.RUNNING,),
        "completed": (JobState.SUCCEEDED,),
        "failed": (JobState.FAILED,),
        "dead": (JobState.DEAD,),
        "cancelled": (JobState.CANCELLED,),
    }
)
"""Each state as QueueCTL calls it, and the states of Holdfast it stands for."""

NAMES: Mapping[JobState, str] = MappingProxyType({state: name for name, states in STATES.items() for state in states})


class Submission(msgspec.Struct, forbid_unknown_fields=True):
    """A job as it is submitted."""

    command: str
    id: str | None = None
    max_retries: int | None = None
    priority: int | None = None
    run_at: str | None = None
    timeout: float | None = None
    user: str | None = None
    depends_on: list[str] = []


def parse(text: str | bytes, line: int | None = None) -> Submission:
    """A submission from JSON; Invalid, saying what is wrong, for anything else."""
    field = "job" if line is None else f"line {line}"
    try:
        submission = msgspec.json.decode(text, type=Submission)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
        raise Invalid(field, shown, f'{error}; write {{"id": "job1", "command": "sleep 1"}}') from None
    if not submission.command.strip():
        raise Invalid("command", submission.command, "give a command")
    if submission.id is not None and not submission.id.strip():
        raise Invalid("id", submission.id, "give a name, or leave it out")
    if submission.user is not None and not submission.user.strip():
        raise Invalid("user", submission.user, "give a name, or leave it out")
    if submission.max_retries is not None and not 0 <= submission.max_retries <= 1000:
        raise Invalid("max_retries", submission.max_retries, "give a whole number from 0 to 1000")
    return submission


def draft_all(app: Holdfast, submissions: Iterable[Submission]) -> list[NewJob]:
    """The Holdfast jobs for them. One may depend on an earlier one, or on a job that is stored."""
    jobs: list[NewJob] = []
    known: dict[str, str] = {}
    for submission in submissions:
        job = drafted(app, submission, [known.get(name) or _stored_id(app, name) for name in submission.depends_on])
        jobs.append(job)
        known[submission.id or job.id] = job.id
    return jobs


def _stored_id(app: Holdfast, name: str) -> str:
    try:
        return app.sync.get(f"key:{name}").id
    except (NotFound, Invalid):
        raise Invalid("depends_on", name, "give the ids of jobs that are there, or on earlier lines") from None


def drafted(app: Holdfast, submission: Submission, after: Sequence[str] = ()) -> NewJob:
    """The Holdfast job for it, checked whole. Its id is its idempotency key. ``after``: ids of jobs to wait for."""
    given = {
        "max_attempts": None if submission.max_retries is None else submission.max_retries + 1,
        "priority": submission.priority,
        "run_at": submission.run_at,
        "timeout": submission.timeout,
        "after": after or None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    own_id = new_id()
    try:
        return app.draft_job(COMMAND, _payload(app, submission), id=own_id, key=submission.id or own_id, **options)
    except Invalid as error:
        raise Invalid(_FIELDS.get(error.field, error.field), error.value, error.remedy) from None


USER = "QUEUECTL_USER"
"""The variable in which a command finds its job's user; limits by user look there."""

_FIELDS = MappingProxyType(
    {"key": "id", "shell": "command", "argv": "command", "after": "depends_on", f"env.{USER}": "user"}
)


def _payload(app: Holdfast, submission: Submission) -> dict[str, Any]:
    own = {} if submission.user is None else {"env": {USER: submission.user}}
    if app.settings.commands == "shell":
        return {"shell": submission.command, **own}
    try:
        return {"argv": shlex.split(submission.command), **own}
    except ValueError as error:
        raise Invalid("command", submission.command, f"{error}; quote it as for a shell") from None


def document(job: Job, depends_on: Sequence[str] = ()) -> dict[str, Any]:
    """A job in QueueCTL's columns. ``attempts`` are the executions that failed; ``depends_on``: ids as shown."""
    running = job.state is JobState.RUNNING
    payload = json.loads(job.payload) if job.task == COMMAND else {}
    return {
        "id": shown_id(job),
        "command": _command(job, payload),
        "state": NAMES[job.state],
        "attempts": job.failures,
        "max_retries": None if job.max_attempts is None else job.max_attempts - 1,
        "priority": job.priority,
        "user": payload.get("env", {}).get(USER),
        "timeout": job.options_or_default.timeout,
        "depends_on": list(depends_on),
        "created_at": _time(job.created_at),
        "run_at": None if job.run_at_us >= NEVER_US else _time(job.run_at),
        "next_retry_at": _time(job.run_at) if job.state is JobState.FAILED else None,
        "locked_by": job.worker if running else None,
        "locked_at": _time(job.started_at) if running else None,
        "ended_at": _time(job.ended_at),
        "error": job.error,
        "output": _output(job),
    }


def shown_id(job: Job) -> str:
    """The id under which a job is shown, and found again."""
    return job.key or job.id


def _command(job: Job, payload: Mapping[str, Any]) -> str:
    """The command; of a job of another task its name and payload."""
    match payload:
        case {"shell": str(text)}:
            return text
        case {"argv": [*words]}:
            return shlex.join(map(str, words))
    return f"{job.task} {job.payload}"


def _output(job: Job) -> str | None:
    """Returns the output of the command; the result of another task as JSON."""
    result = None if job.result is None else json.loads(job.result)
    return result["stdout"] if job.task == COMMAND and isinstance(result, dict) and "stdout" in result else job.result


def _time(when: datetime | None) -> str | None:
    return None if when is None else when.isoformat(timespec="milliseconds")


def counts(states: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """How many jobs in each of QueueCTL's states, from Holdfast's counts by queue; cancelled ones if there are any."""
    counted = dict.fromkeys(STATES, 0)
    for each in states:
        for state, count in each.items():
            counted[NAMES[JobState(state)]] += count
    return {name: count for name, count in counted.items() if count or name != "cancelled"}
