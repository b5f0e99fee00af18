"""Documents of limits, for CLI and HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.core.limit_options import format_rate
from holdfast.core.limits import BucketUse, Limit, LimitValues, split_bucket
from holdfast.stores.base import Store
from holdfast.views.documents import Instant
from holdfast.views.formatting import format_timestamp

MAX_VALUES = 100
"""Maximum number of values of a key in one call."""

LimitName = Annotated[str, Meta(description="The limit's name.", examples=["crm"])]
Rate = Annotated[str, Meta(description="Starts in a span.", examples=["10/s"])]
Weight = Annotated[
    int | str, Meta(description="The room and tokens that a job takes, or the place in its payload that says so.")
]


class LimitValuesDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a limit."""

    concurrency: Annotated[int | None, Meta(description="Jobs that may run at once; null: any number.")]
    rate: Rate | None
    burst: Annotated[int | None, Meta(description="Starts that may come at once; null: it has no rate.")]
    weight: Weight
    shares: Annotated[dict[str, int], Meta(description="Turns by value of the key; 1 for any other value.")]
    depth: Annotated[int | None, Meta(description="Jobs that may wait; null: any number.")]


class BucketDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a limit, or of one value of its key."""

    value: Annotated[str | None, Meta(description="The value of the key; null: the limit has no key.")]
    used: Annotated[int, Meta(description="The weight of its running jobs.", ge=0)]
    free_at: Annotated[
        Instant | None, Meta(description="When tokens or a pause let a job of weight 1 start; null: now.")
    ]
    paused: Annotated[bool, Meta(description="It is paused until then, by an operator or by RetryAfter.")]


class LimitDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A limit: the jobs it applies to, its values, and its use."""

    name: LimitName
    queue: Annotated[str | None, Meta(description="It applies to jobs of this queue.")]
    task: Annotated[str | None, Meta(description="It applies to jobs of this task; neither: handlers take tokens.")]
    by: Annotated[str | None, Meta(description="A place in the payload: each value of it has a bucket.")]
    concurrency: Annotated[int | None, Meta(description="Jobs that may run at once; null: any number.")]
    rate: Rate | None
    burst: Annotated[int | None, Meta(description="Starts that may come at once; null: it has no rate.")]
    weight: Weight
    shares: Annotated[dict[str, int], Meta(description="Turns by value of the key; 1 for any other value.")]
    depth: Annotated[int | None, Meta(description="Jobs that may wait; null: any number.")]
    owner: Annotated[str | None, Meta(description="The application whose code declares it; null: an operator made it.")]
    changed: Annotated[bool, Meta(description="An operator's values are in force, not those of the code.")]
    declared: Annotated[LimitValuesDocument | None, Meta(description="The values of the code, where it is changed.")]
    buckets: Annotated[list[BucketDocument], Meta(description="Its use; with a key, that of the values asked for.")]
    revision: Annotated[int, Meta(description="Grows with each change.", ge=0)]


def limit_document(limit: Limit, uses: Sequence[BucketUse] = ()) -> LimitDocument:
    """Returns the document of a limit with the use of its buckets."""
    return LimitDocument(
        name=limit.name,
        queue=limit.queue,
        task=limit.task,
        by=limit.by,
        **msgspec.structs.asdict(_values_document(limit.values)),
        owner=limit.owner,
        changed=limit.declared is not None,
        declared=None if limit.declared is None else _values_document(limit.declared),
        buckets=[_bucket_document(use) for use in uses],
        revision=limit.revision,
    )


def _values_document(values: LimitValues) -> LimitValuesDocument:
    return LimitValuesDocument(
        concurrency=values.concurrency,
        rate=format_rate(values),
        burst=None if values.rate is None else values.burst,
        weight=values.weight,
        shares=values.shares,
        depth=values.depth,
    )


def _bucket_document(use: BucketUse) -> BucketDocument:
    return BucketDocument(
        value=split_bucket(use.bucket)[1],
        used=use.used,
        free_at=format_timestamp(use.free_at_us) if use.free_at_us else None,
        paused=use.paused,
    )


async def list_documents(store: Store, limits: Sequence[Limit]) -> list[LimitDocument]:
    """Returns the documents of limits; with the use of limits without a key."""
    names = [limit.name for limit in limits if limit.by is None]
    uses = {use.bucket: use for use in await store.limits.bucket_use(names)} if names else {}
    return [limit_document(limit, [uses[limit.name]] if limit.name in uses else ()) for limit in limits]


def describe_scope(limit: Limit) -> str:
    """Text for the jobs that a limit applies to: "queue mail", "task crm.sync", "handlers"."""
    if limit.queue is not None:
        return f"queue {limit.queue}"
    return "handlers" if limit.task is None else f"task {limit.task}"


def describe_values(values: LimitValues) -> str:
    """Text for the numbers of a limit: "5 at once, 10/s (burst 1), weight args.pages"."""
    words = [] if values.concurrency is None else [f"{values.concurrency:,} at once"]
    if values.rate is not None:
        words.append(f"{format_rate(values)} (burst {values.burst:,})")
    if values.weight != 1:
        words.append(f"weight {values.weight}")
    if values.shares:
        words.append(f"shares {', '.join(f'{value}={share}' for value, share in sorted(values.shares.items()))}")
    if values.depth is not None:
        words.append(f"depth {values.depth:,}")
    return ", ".join(words) or "turns only"


def parse_key_values(texts: Iterable[str]) -> list[Any]:
    """Parses values of a key: a JSON object or array as such, anything else as text.

    Text names the same bucket as the number, the boolean or the null that it spells.
    """
    return [_parse_key_value(text) for text in texts]


def _parse_key_value(text: str) -> Any:
    if text[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


LIMIT: dict[str, Any] = {
    "name": "crm",
    "queue": "crm",
    "task": None,
    "by": "args.tenant",
    "concurrency": 2,
    "rate": "10/s",
    "burst": 1,
    "weight": 1,
    "shares": {"acme": 3},
    "depth": None,
    "owner": "code",
    "changed": True,
    "declared": {"concurrency": 1, "rate": "10/s", "burst": 1, "weight": 1, "shares": {}, "depth": None},
    "buckets": [{"value": "acme", "used": 2, "free_at": "2030-01-31T08:00:00.100000Z", "paused": False}],
    "revision": 1_896_048_000_000_031,
}
"""Limit in examples."""
