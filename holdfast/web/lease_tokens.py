"""Lease tokens and worker fields of a worker over HTTP.

A token only names a lease; every decision reads the store. Tokens are not signed: the store accepts a lease only from
the worker that holds it.
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
from holdfast.web.fields import MAX_LIST, Field, ValueType, array_value, integer_value, seconds_value, text_value
from holdfast.web.routing import RequestContext

_MAX_TOKEN = 1000
_MAX_CLAIMS = (1 << 53) - 1
_MAX_LEASE = 86_400
_ID_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$"
SAMPLE = "MS4wMTkzZTRhMC0xYzJmLTdhMzUtOWQzYi01ZjBhNGMxZTJiNzc"

Token = Annotated[str, Meta(description="Stands for the lease; of no other meaning.", examples=[SAMPLE])]


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────────────────────
def token_of(lease: Lease) -> str:
    """Returns the HTTP form of a lease."""
    return base64.urlsafe_b64encode(f"{lease.claims}.{lease.job_id}".encode()).rstrip(b"=").decode()


_TOKEN_TEXT = text_value(1, _MAX_TOKEN)


def lease_of(token: Any, field: str) -> Lease:
    """Returns the lease of a token; raises Invalid for text that is no token."""
    padded = _TOKEN_TEXT.check(token, field)
    try:
        data = base64.b64decode(padded + "=" * (-len(padded) % 4), altchars=b"-_", validate=True)
        claims, point, job_id = data.decode().partition(".")
    except (binascii.Error, ValueError):
        claims = point = job_id = ""
    if not (point and job_id and claims.isascii() and claims.isdecimal() and len(claims) <= 16):
        raise Invalid(field, token, "give a token as a claim gave it")
    if int(claims) > _MAX_CLAIMS or "\0" in job_id:
        raise Invalid(field, token, "give a token as a claim gave it")
    return Lease(job_id, int(claims))


def check_once(leases: Sequence[Lease], field: str) -> None:
    """Refuses a lease that is named twice: its two answers would contradict each other."""
    seen: set[Lease] = set()
    for index, lease in enumerate(leases):
        if lease in seen:
            raise Invalid(field.format(index), RawText("this lease"), "name each lease once", "is named twice")
        seen.add(lease)


# ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────
def worker_of(call: RequestContext) -> str:
    """Returns the worker's id in the store, prefixed by the id of its key: keys share no workers."""
    own: str = call.body["worker"]
    return own if call.caller.key is None else f"{call.caller.key}.{own}"


class LeaseRecord(msgspec.Struct, frozen=True):
    """A presented lease, its job, and True in ``has_lease`` if the worker holds it."""

    lease: Lease
    job: Job | None
    has_lease: bool


async def read_leases(store: Store, worker: str, leases: Sequence[Lease]) -> list[LeaseRecord]:
    """Returns the records of these leases in order. ``has_lease`` may be stale: the store decides when it settles."""
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
    """Parses tokens of leases, each at most once; the list may be empty."""
    leases = [] if value == [] else array_value(TOKEN_VALUE, MAX_LIST).check(value, field)
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
    seconds_value(_MAX_LEASE, 1),
    "Seconds from now for which the jobs are the worker's. Default: the setting `lease`.",
    example=30,
)
LEASES = Field(
    "leases",
    ValueType({"type": "array", "maxItems": MAX_LIST, "items": TOKEN_VALUE.schema}, parse_tokens),
    "The tokens of all jobs that it has claimed.",
    example=[SAMPLE],
    required=True,
)
STATUS_FIELDS = (
    Field(
        "host", text_value(1, 100), "Its host or name in the list of workers. Default: its address.", example="app-1"
    ),
    _count("pid", "Its process.", (1 << 31) - 1),
    _count("concurrency", "How many jobs it runs at once.", 1_000_000),
    _count("running", "How many it has claimed now.", 1_000_000),
    _count("succeeded", "Number of successes. Where neither is given, both are counted here."),
    _count("failed", "Number of failures."),
    Field("version", text_value(1, 64), "Version of its application.", example="2.4.1"),
    _count("memory", "Resident bytes of its process.", 1 << 50),
)


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status that a worker reports about itself."""

    host: str
    pid: int = 0
    concurrency: int = 0
    running: int = 0
    succeeded: int | None = None
    failed: int | None = None
    version: str | None = None
    memory: int | None = None


def parse_worker(call: RequestContext) -> WorkerStatus:
    """Reads the worker's fields of a request."""
    given = {field.name: call.body[field.name] for field in STATUS_FIELDS if field.name in call.body}
    return WorkerStatus(**{"host": call.request.client or "unknown", **given})


# ── queues ────────────────────────────────────────────────────────────────────────────────────────────────────────
EVERY = "*"
_JOBS_PER_STATE = 100
"""Jobs of each state that are read for queue names. Unstarted jobs always name their queue; recently ended jobs add
queues that are likely to get more."""


def queue_or_wildcard(name: Any, field: str) -> str:
    """Validates a queue's name, or ``*`` for every queue."""
    return EVERY if name == EVERY else check_name(field, name)


async def allowed_capacity(call: RequestContext, capacity: dict[str, int]) -> tuple[dict[str, int], frozenset[str]]:
    """Returns the capacity within the caller's queues, and those of them that share the slots of `*`. Refuses a queue
    the key does not allow."""
    for name in capacity:
        if name != EVERY:
            call.caller.check_queue(name)
    if EVERY not in capacity or not call.caller.is_restricted:
        return capacity, frozenset()
    named = [pattern for pattern in call.caller.queues if not set(pattern) & set("*?[")]
    patterned = len(named) < len(call.caller.queues)
    queues = await call.app.queues(most=_JOBS_PER_STATE) if patterned else []
    present = [each.name for each in queues if call.caller.allows_queue(each.name)]
    given = {name: slots for name, slots in capacity.items() if name != EVERY}
    wildcard_queues = frozenset([*named, *present]) - set(given)
    return {**dict.fromkeys(wildcard_queues, capacity[EVERY]), **given}, wildcard_queues
