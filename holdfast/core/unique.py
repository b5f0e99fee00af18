"""Uniqueness: of jobs that do the same work, only one may wait, be active, or be submitted within a time.

A policy and a payload make a key, which travels with the job. A store keeps it beside the idempotency keys, under the
same unique index. Whether it is free is read from the state of the job that holds it, so no transition has to free it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.encryption import Codec
from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.models import MICROSECOND, Job, NewJob, Options, UniqueKey
from holdfast.core.validation import check_span, did_you_mean, value_at

KEY_PREFIX = "\x1f"
"""Prefix of the keys made here. No idempotency key begins so: control characters are refused in those."""

_SCOPES = ("unstarted", "active")
_CONFLICTS = ("keep", "replace", "reschedule")
_PARTS = ("task", "queue", "args")
_MAX_PARTS = 20


class Unique(msgspec.Struct, frozen=True):
    """A policy for jobs that do the same work: ``@app.task(unique=Unique("active", by=["args.customer"]))``.

    during: "unstarted": until a worker starts it, and again before a retry; "active": until it has ended; or
    a span, as seconds, a timedelta or text like "10m": for so long after its submission, even if it ends.
    by: the parts that two jobs must share to be the same: "task", "queue", "args" (the whole payload) or "args.NAME",
    one of its values; "args.a.b" is one in an object. A value that the payload lacks counts as null.
    on_conflict: "keep" leaves the first job as it is; "replace" gives it the payload, priority and time of the second;
    "reschedule" only its time. A running job stays as it is.
    """

    during: str | float | timedelta
    by: Sequence[str] = _PARTS
    on_conflict: str = "keep"

    def __post_init__(self) -> None:
        if self.during not in _SCOPES:
            parse_window(self.during)
        _check_parts(self.by)
        if self.on_conflict not in _CONFLICTS:
            suggestion = did_you_mean(self.on_conflict, _CONFLICTS)
            raise Invalid("unique.on_conflict", self.on_conflict, f"give keep, replace or reschedule{suggestion}")
        if self.on_conflict != "keep" and not {"task", "queue"} <= set(self.by):
            remedy = f'add "task" and "queue": a job that may be {self.on_conflict}d must be of the same kind'
            raise Invalid("unique.by", list(self.by), remedy)

    def bind(self, job: NewJob, codec: Codec | None = None) -> NewJob:
        """The job with its key. With a codec it is hashed under a secret, so that it reveals no arguments."""
        window = None if self.during in _SCOPES else parse_window(self.during) // MICROSECOND
        key = UniqueKey(
            key=self._key_of(job, codec),
            during=None if window is not None else str(self.during),
            window_us=window,
            on_conflict=self.on_conflict,
        )
        return msgspec.structs.replace(job, options=msgspec.structs.replace(job.options or Options(), unique=key))

    def _key_of(self, job: NewJob, codec: Codec | None) -> str:
        # The standard module keeps integers exact, and lone surrogates apart.
        payload = json.loads(job.payload) if any(part.startswith("args") for part in self.by) else None
        values = {part: _value_of(part, job, payload) for part in self.by}
        text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
        try:
            return KEY_PREFIX + (hashlib.sha256(text).hexdigest() if codec is None else codec.hash_text(text))
        except HoldfastError:
            raise  # it says what the codec lacks
        except Exception as error:
            raise HoldfastError(f"the codec could not hash a unique key ({type(error).__name__})") from error


def _check_parts(by: object) -> None:
    if isinstance(by, str) or not isinstance(by, Sequence) or not by:
        raise Invalid("unique.by", by, 'give a list, such as ["task", "args.customer"]')
    if len(by) > _MAX_PARTS:
        raise Invalid("unique.by", f"{len(by)} parts", f"give at most {_MAX_PARTS}")
    for part in by:
        head, dot, path = str(part).partition(".")
        if head not in _PARTS or (dot and (head != "args" or not all(path.split(".")))):
            raise Invalid("unique.by", part, 'give "task", "queue", "args" or "args.NAME"')


def as_unique(value: Unique | str | float | timedelta | Mapping[str, Any]) -> Unique:
    """Returns a policy from a policy, its ``during`` or its fields by name. Invalid names the wrong field."""
    match value:
        case Unique():
            return value
        case Mapping():
            unknown = set(value) - set(Unique.__struct_fields__)
            if unknown or "during" not in value:
                name = min(unknown, default="nothing")
                remedy = f"give during, and if need be by and on_conflict{did_you_mean(name, Unique.__struct_fields__)}"
                raise Invalid("unique", name, remedy)
            return Unique(**value)
    return Unique(value)


def holds_unique(holder: Job, other: Job) -> bool:
    """Returns True if the job holds the unique key of the other one, by the policy of the other one."""
    unique = other.options_or_default.unique
    return unique is not None and (holder.state in unique.states or unique.window_us is not None)


def parse_window(value: object) -> timedelta:
    """The span of a policy that ends with time."""
    if isinstance(value, str) and value.isalpha():
        remedy = f'give "unstarted", "active", or a span such as "10m"{did_you_mean(value, _SCOPES)}'
        raise Invalid("unique.during", value, remedy)
    span = check_span(value, "unique.during")
    if span <= timedelta(0):
        raise Invalid("unique.during", value, "give a span above 0")
    return span


def _value_of(part: str, job: NewJob, payload: object) -> Any:
    if part.startswith("args"):
        return value_at(payload, part)
    return job.task if part == "task" else job.queue
