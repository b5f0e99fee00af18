"""Lease tokens and worker fields of a worker over HTTP.

A token says which lease is meant and nothing else: every decision reads the store. No need to
guess that a forged one does no harm: a lease counts only for the worker that the store says has it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.core.errors import Invalid
from holdfast.core.models import Job, JobState, Lease
from holdfast.core.validation import check_name, check_worker_id
from holdfast.stores.base import Store
from holdfast.tasks.codec import RawText
from holdfast.web.fields import Field, ValueType, array_value, integer_value, seconds_value, text_value
from holdfast.web.routing import RequestContext

MOST = 1000
"""Leases one request may be about."""
_TOKEN_MOST = 1000
_CLAIMS_MOST = (1 << 53) - 1
_LEASE_MOST = 86_400
_ID_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$"
SAMPLE = "MS4wMTkzZTRhMC0xYzJmLTdhMzUtOWQzYi01ZjBhNGMxZTJiNzc"

Token = Annotated[str, Meta(description="Stands for the lease; of no other meaning.", examples=[SAMPLE])]


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────
def token_of(lease: Lease) -> str:
    """Returns the HTTP form of a lease."""
    return base64.urlsafe_b64encode(f"{lease.claims}.{lease.job_id}".encode()).rstrip(b"=").decode()


_TOKEN_TEXT = text_value(1, _TOKEN_MOST)


def lease_of(token: Any, field: str) -> Lease:
    """The lease that a token stands for; Invalid for text that no claim ever gave."""
    padded = _TOKEN_TEXT.check(token, field)
    try:
        data = base64.b64decode(padded + "=" * (-len(padded) % 4), altchars=b"-_", validate=True)
        claims, point, job_id = data.decode().partition(".")
    except (binascii.Error, ValueError):
        claims = point = job_id = ""
    if not (point and job_id and claims.isascii() and claims.isdecimal() and len(claims) <= 16):
        raise Invalid(field, token, "give a token as a claim gave it")
    if int(claims) > _CLAIMS_MOST or "\0" in job_id:
        raise Invalid(field, token, "give a token as a claim gave it")
    return Lease(job_id, int(claims))


def check_once(leases: Sequence[Lease], field: str) -> None:
    """Refuse a lease that is named twice: its two answers would contradict one another."""
    seen: set[Lease] = set()
    for place, lease in enumerate(leases):
        if lease in seen:
            raise Invalid(field.format(place), RawText("this lease"), "name each lease once", "is named twice")
        seen.add(lease)


# ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────
def worker_of(call: RequestContext) -> str:
    """Returns the worker's id in the store: its own behind the id of its key, so that keys share no workers."""
    own: str = call.body["worker"]
    return own if call.caller.key is None else f"{call.caller.key}.{own}"


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease that was shown, the job it is about, and whether the worker has it."""

    lease: Lease
    job: Job | None
    held: bool


async def read_leases(store: Store, worker: str, leases: Sequence[Lease]) -> list[LeaseRecord]:
    """Returns the status of these leases, in their order. ``held``: as far as can be seen; the store has the last
    word.
    """
    jobs = await store.query.summaries([lease.job_id for lease in leases])
    return [
        LeaseRecord(lease, job, job is not None and _has(job, worker, lease))
        for lease, job in zip(leases, jobs, strict=True)
    ]


def _has(job: Job, worker: str, lease: Lease) -> bool:
    return job.state is JobState.RUNNING and job.claims == lease.claims and job.worker == worker


# ── fields ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _worker_id(value: Any, field: str) -> str:
    return check_worker_id(field, text_value(1, 40).check(value, field))


def parse_tokens(value: Any, field: str) -> list[Lease]:
    """Tokens of leases, each once; none at all is fine."""
    leases = [] if value == [] else array_value(TOKEN_VALUE, MOST).check(value, field)
    check_once(leases, field + "[{}]")
    return leases


def _count(name: str, doc: str, most: int = 1_000_000_000) -> Field:
    return Field(name, integer_value(0, most), doc)


TOKEN_VALUE = ValueType({**_TOKEN_TEXT.schema, "pattern": "^[A-Za-z0-9_-]+$"}, lease_of)
WORKER = Field(
    "worker",
    ValueType({"type": "string", "pattern": _ID_PATTERN}, _worker_id),
    "The worker's id: one of its own for each start, never the host's name alone.",
    example="js-7c1f",
    required=True,
)
LEASE = Field(
    "lease",
    seconds_value(_LEASE_MOST, 1),
    "Seconds from now for which the jobs are the worker's; the setting `lease` where nothing is said.",
    example=30,
)
LEASES = Field(
    "leases",
    ValueType({"type": "array", "maxItems": MOST, "items": TOKEN_VALUE.schema}, parse_tokens),
    "The tokens of all the jobs it has in hand.",
    example=[SAMPLE],
    required=True,
)
ABOUT = (
    Field(
        "host",
        text_value(1, 100),
        "Where it runs, or what it is called, for who lists workers; its address where nothing is said.",
        example="app-1",
    ),
    _count("pid", "Its process.", (1 << 31) - 1),
    _count("concurrency", "How many jobs it runs at once.", 1_000_000),
    _count("running", "How many it has in hand now.", 1_000_000),
    _count("succeeded", "How many it has done; counted here where nothing is said."),
    _count("failed", "How many have failed; counted here where nothing is said."),
)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a worker about itself."""

    host: str
    pid: int = 0
    concurrency: int = 0
    running: int = 0
    succeeded: int | None = None
    failed: int | None = None


def parse_worker(call: RequestContext) -> About:
    """Reads the worker's fields of a request."""
    given = {field.name: call.body[field.name] for field in ABOUT if field.name in call.body}
    return About(**{"host": call.request.client or "unknown", **given})


# ── queues ────────────────────────────────────────────────────────────────────────────────────────────────────────
EVERY = "*"
_NAMING = 100
"""Jobs of a state that are looked at for the names of queues. What waits always names its queue; what ended of late
does so that who waits hears at once when there is more."""


def queue_or_star(name: Any, field: str) -> str:
    """A queue's name, or ``*`` for every queue."""
    return EVERY if name == EVERY else check_name(field, name)


async def own_wants(call: RequestContext, capacity: dict[str, int]) -> dict[str, int]:
    """Returns the wanted jobs within the caller's queues: a star means these alone. A queue that is named and not
    theirs is refused.
    """
    for name in capacity:
        if name != EVERY:
            call.caller.check_queue(name)
    if EVERY not in capacity or not call.caller.limited:
        return capacity
    named = [pattern for pattern in call.caller.queues if not set(pattern) & set("*?[")]
    patterned = len(named) < len(call.caller.queues)
    queues = await call.app.queues(most=_NAMING) if patterned else []
    there = [each.name for each in queues if call.caller.allows_queue(each.name)]
    given = {name: slots for name, slots in capacity.items() if name != EVERY}
    return {**dict.fromkeys([*named, *there], capacity[EVERY]), **given}
