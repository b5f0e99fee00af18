"""Conversion between rows and models: state codes, JSON shapes, microseconds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import timedelta

import msgspec

from holdfast.core.job_changes import JobChanges
from holdfast.core.models import MICROSECOND, Job, JobFilter, NewJob, Options, UniqueKey, to_microseconds
from holdfast.stores.common.named_sql import CODES
from holdfast.stores.common.requests import UNREADABLE

INLINE_PAYLOAD = 256
"""Characters of a payload kept in the job's own row; a longer one has a row of its own (1.5 times faster at 1 kB)."""

decode_jobs = msgspec.json.Decoder(list[Job]).decode
decode_seqs = msgspec.json.Decoder(list[int]).decode
decode_job = msgspec.json.Decoder(Job).decode
decode_unique = msgspec.json.Decoder(UniqueKey).decode

_PUNCTUATION = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]')
_OPTIONS, _PAYLOAD = map(Job.__struct_fields__.index, ("options", "payload"))


def array_elements(array: str) -> list[str]:
    """The texts of a JSON array's elements, however deep they nest: no decoder of Python's follows as far as SQLite."""
    depth, begun, found = 0, 1, []
    for mark in _PUNCTUATION.finditer(array):
        if mark[0] in "[{":
            depth += 1
        elif mark[0] in "]}":
            depth -= 1
        if depth == 0 or (depth == 1 and mark[0] == ","):
            found.append(array[begun : mark.start()])
            begun = mark.end()
    return found


def read_job(job_json: str) -> Job:
    """A job as a reader is shown it. Of a row that another program corrupted, unreadable values are left out."""
    try:
        return decode_job(job_json)
    except UNREADABLE:
        fields = array_elements(job_json)
        fields[_OPTIONS] = "null"
        if fields[_PAYLOAD] == "null":
            fields[_PAYLOAD] = '"null"'
        return decode_job(f"[{','.join(fields)}]")


encode_json = msgspec.json.Encoder().encode


def as_json(values: Iterable[object]) -> str:
    """A batch as one statement parameter. The standard module: it keeps lone surrogates apart and integers exact."""
    return json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))


def span_us(span: timedelta) -> int:
    """A duration in microseconds."""
    return span // MICROSECOND


def run_at_us(job: NewJob | JobChanges, now_us: int) -> int:
    """The instant at which a job may begin: at once where it does not say, and never in the past."""
    if job.run_at_us is not None:
        return max(job.run_at_us, now_us)
    return now_us if job.delay is None else now_us + span_us(job.delay)


def expiry_us(job: NewJob | JobChanges, now_us: int) -> int | None:
    """The instant by which a job must have begun; None for no such instant."""
    if job.expires_in is not None:
        return now_us + span_us(job.expires_in)
    return job.expires_at_us or None


def options_text(options: Options | None) -> str | None:
    """Options as they are stored; None for a job without any."""
    return None if options is None or options == Options() else encode_json(options).decode()


def job_row(job: NewJob, now_us: int) -> tuple[object, ...]:
    """The parameters of the insert statements, in their order; an empty text for no payload, options or partition."""
    is_timed = job.delay is not None or job.run_at_us is not None
    run_at = run_at_us(job, now_us) if is_timed else now_us
    payload, options = job.payload, job.options
    return (
        job.id,
        job.queue,
        job.task,
        payload if len(payload) <= INLINE_PAYLOAD else "",
        0 if run_at <= now_us else 1,
        -job.priority,
        run_at,
        now_us,
        job.max_attempts,
        0 if job.key is None and (options is None or options.unique is None) else 1,
        "" if options is None else encode_json(options).decode(),
        now_us if job.has_client_id else 0,
        job.partition or "",
        job.weights or "",
    )


def filter_parameters(where: JobFilter) -> dict[str, object]:
    """A filter as the parameters of ``find`` and ``count``; None leaves a condition out."""
    return {
        "states": as_json(CODES[state] for state in where.states) if where.states else None,
        "queue": where.queue,
        "tasks": as_json(where.tasks) if where.tasks else None,
        "tag": where.tag,
        "reason": where.reason,
        "worker": where.worker,
        "error": where.error,
        "error_group": where.error_group,
        "created_after": None if where.created_after is None else to_microseconds(where.created_after),
        "created_before": None if where.created_before is None else to_microseconds(where.created_before),
        "not_started_after": None if where.not_started_after is None else to_microseconds(where.not_started_after),
    }
