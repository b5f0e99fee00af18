"""Conversion between hashes and models. Payloads and results are text that is never looked into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec

from holdfast.core.batches import BatchEnded, BatchRefused, missing_batch
from holdfast.core.dependencies import missing_dependency
from holdfast.core.errors import Conflict, HoldfastError, Invalid
from holdfast.core.job_changes import JobChanges
from holdfast.core.job_logs import LogBatch, LogLine, NewLine
from holdfast.core.models import (
    MICROSECOND,
    Attempt,
    ExpiredJob,
    Job,
    JobFilter,
    JobState,
    Lease,
    NewJob,
    Options,
    Settlement,
    Submitted,
    to_microseconds,
)
from holdfast.core.unique import KEY_PREFIX
from holdfast.stores.common.requests import UNREADABLE
from holdfast.stores.common.unconfirmed import stored_ids
from holdfast.stores.connections.redis import split_parts
from holdfast.stores.connections.redis_protocol import Argument

Fields: TypeAlias = dict[bytes, bytes]

_MAX_EXACT = 1 << 53  # a number Lua and a sorted set keep exactly
_MAX_PRIORITY = 1_000_000
_encode = msgspec.json.Encoder().encode
_options = msgspec.json.Decoder(Options).decode
_attempt = msgspec.msgpack.Decoder(tuple[Any, ...]).decode

Shown: TypeAlias = tuple[int, Job]
"""A job and its place in the order of submission."""
Spec: TypeAlias = tuple[int, int | None, str, str]
"""Priority, max_attempts, queue and task of a job; edits change them."""


def span_us(span: timedelta) -> int:
    """A duration in microseconds."""
    return span // MICROSECOND


# ── into Redis ────────────────────────────────────────────────────────────────────────────────────────────────────
def partition_field(partition: str | None, weights: str | None) -> str:
    """A partition and the weights of a job in its buckets as one text; "" for none."""
    return (partition or "") if weights is None else f"{partition}\n{weights}"


def encode_changes(changes: JobChanges) -> list[Argument]:
    """Changes as names and values for ``edit``. Invalid for values that Redis cannot hold exactly."""
    if changes.priority is not None:
        _check_priority(changes.priority)
    if changes.queue is not None:
        _check_queue(changes.queue)
    provided: dict[str, Argument | None] = {
        "priority": changes.priority,
        "queue": changes.queue,
        "when": when_text(changes) if changes.has_time else None,
        "payload": changes.payload,
        "expires": expiry_text(changes) if changes.has_expiry else None,
    }
    if changes.options is not None:
        provided["options"] = b"" if changes.options == Options() else _encode(changes.options)
    return [argument for name, value in provided.items() if value is not None for argument in (name, value)]


def expiry_text(job: NewJob | JobChanges) -> str:
    """By when it must have begun: "-" for never."""
    if job.expires_in is not None:
        return f"+{span_us(job.expires_in)}"
    if isinstance(job.expires_at_us, int) and abs(job.expires_at_us) >= _MAX_EXACT:
        raise Invalid("expires", job.expires_at_us, "give an instant within 200 years")
    return f"={job.expires_at_us}" if isinstance(job.expires_at_us, int) else "-"


def when_text(job: NewJob | JobChanges) -> str:
    """Its `run_at`: at once, after a span, at an instant."""
    if job.run_at_us is None:
        return "" if job.delay is None else f"+{span_us(job.delay)}"
    if abs(job.run_at_us) >= _MAX_EXACT:
        raise Invalid("run_at", job.run_at_us, "give an instant within 200 years")
    return f"={job.run_at_us}"


def spec_text(job: NewJob) -> str:
    """Returns the spec of a new job, as its hash holds it; edits and limits rewrite it."""
    _check_priority(job.priority)
    _check_queue(job.queue)
    max_attempts = "-" if job.max_attempts is None else job.max_attempts
    return f"{job.priority} {max_attempts} {job.queue}\n{job.task}" + ("" if job.partition is None else "\n")


def _check_priority(priority: int) -> None:
    if abs(priority) > _MAX_PRIORITY:
        raise Invalid("priority", priority, f"give from -{_MAX_PRIORITY} to {_MAX_PRIORITY}")


def _check_queue(queue: str) -> None:
    if "\n" in queue:
        raise Invalid("queue", queue, "leave the line break out")


def expired_jobs(flat: Sequence[bytes], specs: Specs) -> tuple[ExpiredJob, ...]:
    """Jobs that have expired, from the ids and specs that a script answers."""
    read = [(decode_text(job_id), specs(spec)) for job_id, spec in zip(flat[::2], flat[1::2], strict=True)]
    return tuple(ExpiredJob(job_id, task, queue) for job_id, (_, _, queue, task) in read)


def encode_settlements(settlements: Sequence[Settlement]) -> list[Argument]:
    """Settlements as arguments of ``settle``."""
    found: list[Argument] = []
    for worker, of_worker in groupby(settlements, _worker):
        found += ("worker", worker or "")
        for what, run in groupby(of_worker, _what):
            if what > 0:
                found += ("first", what, "".join([each.job_id for each in run]))
            elif what == _SUCCESS:
                some = list(run)
                found += ("success", len(some))
                for each in some:
                    found += (each.job_id, each.claims, each.result or "")
            else:
                for each in run:
                    found += ("other", *_other(each))
    return found


_worker = attrgetter("worker")


_SUCCESS, _OTHER = 0, -1


def _what(each: Settlement) -> int:
    """The length of its id for a success without a result under a first claim; else its encoding."""
    if each.state is not JobState.SUCCEEDED or each.lease_expired or each.refund or each.delay is not None:
        return _OTHER
    return len(each.job_id) if each.claims == 1 and not each.result and each.job_id.isascii() else _SUCCESS


def _other(each: Settlement) -> tuple[Argument, ...]:
    return (
        each.job_id,
        each.claims,
        each.state.value,
        each.reason.value if each.reason is not None else "",
        "" if each.delay is None else span_us(each.delay),
        ("r" if each.refund else "")
        + ("e" if each.lease_expired else "")
        + ("" if each.priority is None else f"p{each.priority}"),
        each.result or "",
        "" if each.error is None else "=" + each.error,
        "" if each.traceback is None else "=" + each.traceback,
        each.error_group or "",
    )


def split_records(records: Sequence[LogBatch], max_lines: int) -> Iterator[list[tuple[int, Sequence[NewLine]]]]:
    """Yields parts of so many lines at most, for one script each: places of records, and their lines in it."""
    part: list[tuple[int, Sequence[NewLine]]] = []
    lines_left = max_lines
    for index, record in enumerate(records):
        for lines in [*split_parts(record.lines, max_lines)] or [()]:
            if len(lines) > lines_left or len(part) >= max_lines:
                yield part
                part, lines_left = [], max_lines
            part.append((index, lines))
            lines_left -= len(lines)
    if part:
        yield part


def encode_logs(lease: Lease, lines: Sequence[NewLine]) -> list[Argument]:
    """Log lines as arguments of ``record``."""
    found: list[Argument] = [lease.job_id, lease.claims, len(lines)]
    for line in lines:
        fields = "" if line.fields is None else "=" + line.fields
        found += (line.number, span_us(line.ago), line.level, line.text, fields)
    return found


def refused_submission(reply: bytes, answers: Sequence[Submitted] = ()) -> HoldfastError:
    """Error for what ``submit`` has refused: a job that waits for one that is not stored, or a member of a batch.
    ``answers``: to its whole submission, of which other parts may be stored."""
    stored = stored_ids(answers)
    if any(stored):
        error = Conflict("a job or batch to which others refer was deleted, or has ended, while these were stored")
        error.stored = stored
        return error
    kind, _, job_id = decode_text(reply).partition(" ")
    errors = {"after": missing_dependency, "missing": missing_batch, "other": BatchRefused, "ended": BatchEnded}
    return errors[kind](job_id)


# ── out of Redis ──────────────────────────────────────────────────────────────────────────────────────────────────
class Specs:
    """Parses specs; most jobs share a few."""

    def __init__(self) -> None:
        self._known: dict[bytes, Spec] = {}

    def __call__(self, text: bytes) -> Spec:
        """ValueError for one that another program corrupted."""
        known = self._known.get(text)
        if known is None:
            head, _, task = text.decode().partition("\n")
            priority, max_attempts, queue = head.split(" ", 2)
            known = (int(priority), None if max_attempts == "-" else int(max_attempts), queue, task.removesuffix("\n"))
            if len(self._known) >= 1000:
                self._known.clear()
            self._known[text] = known
        return known


def claimed_job(row: Sequence[Any], specs: Specs, worker: str) -> Job:
    """The job of a claim's row. ValueError or RecursionError for a job that another program corrupted."""
    job_id, spec, payload, run_at, *more = row
    priority, max_attempts, queue, task = specs(spec)
    if not more:  # a job without options that was never claimed before
        run_at_us = int(run_at)
        given = job_id.decode(), task, queue, payload.decode(), 1, 1, max_attempts, priority, 0, run_at_us, run_at_us
        return Job(*given, None, JobState.RUNNING, worker)
    created, options, claims, attempts, lost_leases = more
    return Job(
        job_id.decode(),
        task,
        queue,
        payload.decode(),
        int(claims),
        int(attempts),
        max_attempts,
        priority,
        int(lost_leases or 0),
        int(run_at),
        int(created or run_at),
        None if options is None else _options(options),
        JobState.RUNNING,
        worker,
    )


def shown_line(entry: Sequence[Any]) -> LogLine:
    """A log line from an entry of its job's stream."""
    entry_id, flat = entry
    claims, _, number = entry_id.decode().partition("-")
    fields = {name: value.decode("utf-8", "replace") for name, value in fields_of(flat).items()}
    return LogLine(
        int(claims),
        int(number),
        int(fields[b"attempt"]),
        int(fields[b"at"]),
        fields[b"level"],
        fields[b"text"],
        fields.get(b"fields"),
    )


def decode_text(text: bytes) -> str:
    """Decodes text that another program may have written."""
    return text.decode("utf-8", "replace")


def state_of(word: bytes) -> JobState | None:
    """A state; None for a word that is none."""
    try:
        return JobState(word.decode())
    except ValueError:
        return None


def whole_number(text: bytes) -> int:
    """A number, 0 where another program wrote something else."""
    try:
        return int(text)
    except ValueError:
        return 0


def split_documents(entries: Iterable[bytes | None]) -> Iterator[tuple[bytes, bytes]]:
    """Document and revision of each ``REVISION DOCUMENT``; None is none."""
    for revision, _, document in (entry.partition(b" ") for entry in entries if entry):
        yield document, revision


def fields_of(flat: Sequence[bytes]) -> Fields:
    """A hash from the flat list a script answers."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def whole_text(fields: Fields, name: bytes) -> str | None:
    """A text that may be in pieces."""
    text = fields.get(name)
    if text is None:
        return None
    if len(text) == 64:
        for number in range(1, 8):
            piece = fields.get(name + b"%d" % number)
            if piece is None:
                break
            text += piece
    return decode_text(text)


def shown_jobs(rows: Iterable[Sequence[Any]], specs: Specs) -> list[Shown]:
    """Readable jobs with their numbers of submission; leaves out spoiled ones and those of unknown states."""
    shown = []
    for job_id, flat, lease in rows:
        fields = fields_of(flat)
        if (state := state_of(fields.get(b"state", b"queued"))) is not None:
            shown.append((_int(fields, b"seq") or 0, _shown(decode_text(job_id), state, fields, lease, specs)))
    return shown


def _shown(job_id: str, state: JobState, fields: Fields, lease: bytes | None, specs: Specs) -> Job:
    try:
        priority, max_attempts, queue, task = specs(fields.get(b"spec", b""))
    except ValueError:
        priority, max_attempts, queue, task = 0, None, "", ""
    run_at = _int(fields, b"dueTime") or 0
    claims, attempts = _int(fields, b"claims") or int(b"pickupTime" in fields), _int(fields, b"attempts")
    return Job(
        job_id,
        task,
        queue,
        whole_text(fields, b"payload") or "null",
        claims,
        claims if attempts is None else attempts,
        max_attempts,
        priority,
        _int(fields, b"lost_leases") or 0,
        run_at,
        _int(fields, b"created") or run_at,
        _readable_options(whole_text(fields, b"options")),
        state,
        _text(fields, b"worker"),
        int(float(lease)) if lease is not None and state is JobState.RUNNING else None,
        _int(fields, b"pickupTime"),
        _int(fields, b"endTime"),
        _text(fields, b"reason"),
        whole_text(fields, b"error"),
        whole_text(fields, b"result"),
        _shown_key(fields),
        b"cancel" in fields,
        _shown_partition(fields),
        _int(fields, b"expiresAt"),
        _text(fields, b"errorGroup"),
    )


def _readable_options(text: str | None) -> Options | None:
    try:
        return None if text is None else _options(text)
    except UNREADABLE:
        return None


def _text(fields: Fields, name: bytes) -> str | None:
    value = fields.get(name)
    return None if value is None else decode_text(value)


def _shown_key(fields: Fields) -> str | None:
    key = _text(fields, b"key")
    return None if key is None or key.startswith(KEY_PREFIX) else key


def _shown_partition(fields: Fields) -> str | None:
    field = _text(fields, b"partition")
    return None if field is None else field.partition("\n")[0]


def _int(fields: Fields, name: bytes) -> int | None:
    value = fields.get(name)
    try:
        return None if value is None else int(value)
    except ValueError:
        return None


def shown_attempts(entries: Iterable[bytes]) -> list[Attempt]:
    """Attempts from their records; other text is left out."""
    shown = []
    for entry in entries:
        with suppress(*UNREADABLE, ValueError, TypeError):
            shown.append(_attempt_of(*_attempt(entry)))
    return shown


def _attempt_of(claims: Any, attempt: Any, worker: Any, started: Any, ended: Any, state: Any, *texts: Any) -> Attempt:
    reason, error, traceback = (None if text is False else text for text in texts)  # false: there is none
    began = None if started is False else int(started)
    return Attempt(
        int(claims), int(attempt), worker or None, began, int(ended), JobState(state), reason, error, traceback
    )


def matches_filter(job: Job, where: JobFilter) -> bool:
    """Returns True if a filter says this of a job."""
    return (
        (not where.states or job.state in where.states)
        and (where.queue is None or job.queue == where.queue)
        and (not where.tasks or job.task in where.tasks)
        and (where.tag is None or where.tag in job.options_or_default.tags)
        and (where.reason is None or job.reason == where.reason)
        and (where.worker is None or job.worker == where.worker)
        and (where.error is None or (job.error is not None and where.error in job.error))
        and where.error_group in (None, job.error_group)
        and (where.created_after is None or job.created_at_us > to_microseconds(where.created_after))
        and (where.created_before is None or job.created_at_us < to_microseconds(where.created_before))
        and (where.not_started_after is None or (job.started_at_us or 0) <= to_microseconds(where.not_started_after))
    )
