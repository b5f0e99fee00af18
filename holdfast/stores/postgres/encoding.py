"""Conversion between rows and models: state codes, texts with NUL, batches as arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from holdfast.core.job_changes import JobChanges
from holdfast.core.job_logs import LogBatch, LogLine
from holdfast.core.models import (
    MICROSECOND,
    Attempt,
    Job,
    JobFilter,
    JobState,
    NewJob,
    Options,
    Settlement,
    Step,
    UniqueKey,
    to_microseconds,
)
from holdfast.stores.common.named_sql import CODES, STATES
from holdfast.stores.common.requests import UNREADABLE

_NUL = "␀"
"""PostgreSQL's text holds every character but NUL, which stands there as ␀0; and ␀ itself as ␀␀."""
_SEPARATOR = "\x1f"  # of payloads: JSON text contains no control characters but white space
_ESCAPED = re.compile(f"{_NUL}([0{_NUL}])")

_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_encode = msgspec.json.Encoder().encode
_options = msgspec.json.Decoder(Options).decode


def is_id(text: str) -> bool:
    """Returns True if a job can have this id at all: PostgreSQL reads a UUID in any spelling, and a job's has one."""
    return _ID.fullmatch(text) is not None


def to_text(text: str) -> str:
    """``text`` as PostgreSQL can hold it."""
    if _NUL in text:
        text = text.replace(_NUL, _NUL + _NUL)
    return text.replace("\0", f"{_NUL}0") if "\0" in text else text


def from_text(text: str) -> str:
    """Returns the input of ``to_text``."""
    if _NUL not in text:
        return text
    return _ESCAPED.sub(lambda found: "\0" if found[1] == "0" else _NUL, text)


def text_or_none(text: str | None) -> str | None:
    """``to_text`` for an optional value."""
    return None if text is None else to_text(text)


def _back(text: str | None) -> str | None:
    return None if text is None else from_text(text)


def span_us(span: timedelta | None) -> int | None:
    """A duration in microseconds."""
    return None if span is None else span // MICROSECOND


def claimed_job(row: Sequence[Any], worker: str) -> Job:
    """A job as a claim of this worker delivers it. UNREADABLE for options another program corrupted."""
    options = None if row[11] is None else _options(row[11])
    job = Job(*row[:11], options, JobState.RUNNING, worker)  # type: ignore[call-arg]  # eleven fields
    if _NUL in job.payload:
        job = msgspec.structs.replace(job, payload=from_text(job.payload))
    return job


def shown_job(row: Sequence[Any]) -> Job:
    """A job as a reader is shown it. Options another program corrupted are left out."""
    fields = list(row)
    try:
        fields[11] = None if row[11] is None else _options(row[11])
    except UNREADABLE:
        fields[11] = None
    fields[3] = from_text(row[3])
    fields[12] = STATES[row[12]]
    for column in (18, 19, 20, 22):  # error, result, key, partition
        fields[column] = _back(row[column])
    return Job(*fields)


def shown_attempt(row: Sequence[Any]) -> Attempt:
    """An attempt from its row."""
    claims, attempt, worker, started_at, ended_at, state, reason, error, traceback = row
    return Attempt(claims, attempt, worker, started_at, ended_at, STATES[state], reason, _back(error), _back(traceback))


def shown_line(row: Sequence[Any]) -> LogLine:
    """A log line from its row."""
    claims, number, attempt, at, level, text, fields = row
    return LogLine(claims, number, attempt, at, from_text(level), from_text(text), _back(fields))


def is_one_row(job: NewJob) -> bool:
    """Returns True for a job whose row is all there is to store."""
    if not job.has_extras:
        return True
    options = job.options
    is_keyed = job.key is not None or bool(options and (options.tags or options.unique))
    return not (is_keyed or job.has_relations or job.expires)


def are_uniform(jobs: Sequence[NewJob]) -> bool:
    """Returns True if these jobs differ in their ids and payloads alone, and are under no limit."""
    first = jobs[0]
    return all(
        job.queue == first.queue
        and job.task == first.task
        and job.priority == first.priority
        and job.delay == first.delay
        and job.run_at_us == first.run_at_us
        and job.max_attempts == first.max_attempts
        and job.options == first.options
        and job.has_client_id == first.has_client_id
        and job.partition is None
        for job in jobs
    )


def uniform_columns(jobs: Sequence[NewJob]) -> dict[str, Any]:
    """Uniform jobs as the parameters of ``insert_uniform_jobs``."""
    payloads = _SEPARATOR.join([to_text(job.payload) for job in jobs])  # the driver takes four times as long for a list
    return {"ids": [job.id for job in jobs], "payloads": payloads, **_common_columns(jobs[0])}


def one_job(job: NewJob) -> dict[str, Any]:
    """A job as the parameters of ``insert_one_job``."""
    return {"id": job.id, "payload": to_text(job.payload), **_common_columns(job)}


def _common_columns(job: NewJob) -> dict[str, Any]:
    return {
        "queue": job.queue,
        "task": job.task,
        "rank": -job.priority,
        "run_at": job.run_at_us,
        "delay": span_us(job.delay),
        "max_attempts": job.max_attempts,
        "options": None if job.options is None else encode_options(job.options),
        "has_client_id": job.has_client_id,
    }


def job_columns(jobs: Sequence[NewJob]) -> dict[str, Any]:
    """A batch as the parameters of the insert statements."""
    return {
        "ids": [job.id for job in jobs],
        "queues": [job.queue for job in jobs],
        "tasks": [job.task for job in jobs],
        "payloads": [to_text(job.payload) for job in jobs],
        "ranks": [-job.priority for job in jobs],
        "run_ats": [job.run_at_us for job in jobs],
        "delays": [span_us(job.delay) for job in jobs],
        "max_attempts": [job.max_attempts for job in jobs],
        "options": [None if job.options is None else encode_options(job.options) for job in jobs],
        "have_client_ids": [job.has_client_id for job in jobs],
        "partitions": [text_or_none(job.partition) for job in jobs],
        "weights": [job.weights for job in jobs],
    }


def encode_options(options: Options) -> str:
    """Options as they are stored."""
    return _encode(options).decode()


def copied_steps(steps: Sequence[Step]) -> dict[str, Any]:
    """Steps of a new job as the parameters of ``copy_steps``."""
    return {
        "names": [to_text(step.name) for step in steps],
        "numbers": [step.number for step in steps],
        "are_ordered": [step.is_ordered for step in steps],
        "claims": [step.claims for step in steps],
        "ended_ats": [step.ended_at_us for step in steps],
        "results": [text_or_none(step.result) for step in steps],
    }


def key_columns(jobs: Sequence[NewJob]) -> dict[str, Any]:
    """Returns the extra columns of batches with keys. Tags and unique keys stand beside the options once more, for
    PostgreSQL finds nothing in JSON that holds a NUL anywhere.
    """
    return {
        "keys": [text_or_none(job.key) for job in jobs],
        "key_for": [span_us(job.key_for) for job in jobs],
        "tags": [_encode(job.options.tags).decode() if job.options and job.options.tags else None for job in jobs],
        "unique_keys": [None if job.unique is None else encode_unique(job.unique) for job in jobs],
        "expires_ats": [job.expires_at_us for job in jobs],
        "expires_ins": [span_us(job.expires_in) for job in jobs],
        "are_waiting": [job.waits for job in jobs] if any(job.waits for job in jobs) else None,
    }


def edit_parameters(job_id: str, changes: JobChanges) -> dict[str, Any]:
    """Changes as the parameters of ``rewrite_unstarted``."""
    options = None if changes.options in (None, Options()) else changes.options
    return {
        "id": job_id,
        "queue": changes.queue,
        "rank": None if changes.priority is None else -changes.priority,
        "payload": text_or_none(changes.payload),
        "run_at": changes.run_at_us,
        "delay": span_us(changes.delay),
        "will_expire": changes.will_expire,
        "retagged": changes.options is not None,
        "options": None if options is None else encode_options(options),
        "tags": [] if options is None else [to_text(tag) for tag in options.tags],
    }


def encode_unique(unique: UniqueKey) -> str:
    """A unique key as the function ``take_unique`` takes it."""
    return _encode(unique).decode()


def stored_unique(options: str) -> UniqueKey | None:
    """The unique key among stored options; None where another program corrupted them."""
    try:
        return _options(options).unique
    except UNREADABLE:
        return None


def settlement_columns(settlements: Sequence[Settlement]) -> dict[str, Any]:
    """A batch as the parameters of ``settle_rest``, ``settle_reprioritized`` and ``settle_with_dependents``."""
    return {
        "ids": [each.job_id for each in settlements],
        "claims": [each.claims for each in settlements],
        "states": [CODES[each.state] for each in settlements],
        "reasons": [each.reason for each in settlements],
        "results": [text_or_none(each.result) for each in settlements],
        "errors": [text_or_none(each.error) for each in settlements],
        "error_groups": [each.error_group for each in settlements],
        "tracebacks": [text_or_none(each.traceback) for each in settlements],
        "delays": [span_us(each.delay) for each in settlements],
        "refunds": [each.refund for each in settlements],
        "lease_expireds": [each.lease_expired for each in settlements],
        "workers": [each.worker for each in settlements],
    }


def record_columns(records: Sequence[LogBatch]) -> dict[str, Any]:
    """A batch as the parameters of ``append_logs``."""
    lines = [(index, line) for index, each in enumerate(records, 1) for line in each.lines]
    return {
        "ids": [each.lease.job_id for each in records],
        "claims": [each.lease.claims for each in records],
        "ordinals": [index for index, _ in lines],
        "numbers": [line.number for _, line in lines],
        "agos": [span_us(line.ago) for _, line in lines],
        "levels": [to_text(line.level) for _, line in lines],
        "texts": [to_text(line.text) for _, line in lines],
        "fields": [text_or_none(line.fields) for _, line in lines],
    }


def filter_parameters(where: JobFilter) -> dict[str, Any]:
    """A filter as the parameters of ``matching``; None leaves a condition out."""
    return {
        "states": [CODES[state] for state in where.states] if where.states else None,
        "queue": where.queue,
        "tasks": list(where.tasks) or None,
        "tag": where.tag,
        "reason": where.reason,
        "worker": where.worker,
        "error": text_or_none(where.error),
        "error_group": where.error_group,
        "created_after": None if where.created_after is None else to_microseconds(where.created_after),
        "created_before": None if where.created_before is None else to_microseconds(where.created_before),
        "not_started_after": None if where.not_started_after is None else to_microseconds(where.not_started_after),
    }


EVERYTHING: Mapping[str, Any] = filter_parameters(JobFilter())
"""The filter that leaves nothing out."""


_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")
_SCHEMA = re.compile(r"\bholdfast\.")
# statement_timestamp() is stable: a bound for an index. clock_timestamp() would filter rows one by one instead.
_CLOCK = "(select coalesce({}::bigint, (extract(epoch from statement_timestamp()) * 1000000)::bigint))"


class NumberedStatement(NamedTuple):
    """A statement and the names of its parameters in their order."""

    name: str
    sql: str
    names: tuple[str, ...]


def in_schema(sql: str, schema: str) -> str:
    """``sql`` written for the schema ``holdfast``, for another one."""
    return _SCHEMA.sub(f'"{schema}".', sql)


def number_parameters(statements: Mapping[str, str], schema: str) -> dict[str, NumberedStatement]:
    """The statements by name. ``:now`` becomes the server's clock, unless a value is given for it."""
    return {name: _numbered(name, sql, schema) for name, sql in statements.items()}


@lru_cache(maxsize=1024)
def _numbered(name: str, sql: str, schema: str) -> NumberedStatement:
    bare = re.sub(r"--[^\n]*", "", in_schema(sql, schema))
    names = tuple(dict.fromkeys(_PARAMETER.findall(bare)))
    placeholders = {parameter: f"${ordinal}" for ordinal, parameter in enumerate(names, 1)}

    def number_parameter(found: re.Match[str]) -> str:
        number = placeholders[found[1]]
        return _CLOCK.format(number) if found[1] == "now" else number

    return NumberedStatement(name, _PARAMETER.sub(number_parameter, bare).strip(), names)
