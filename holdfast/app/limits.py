"""Limits of an application: declared in code, or made and changed at run time by Python, CLI and HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from holdfast.app.sync import Blocker, BlockingMethod, BlockingView, requires_loop
from holdfast.core.errors import Conflict, Invalid, NotFound
from holdfast.core.events import DeclarationKept, Events
from holdfast.core.limits import (
    MAX_CONCURRENCY,
    MAX_DEPTH,
    MAX_LIMITS,
    MAX_RATE,
    MAX_SHARE,
    MAX_WEIGHT,
    BucketUse,
    Limit,
    LimitChange,
    LimitTable,
    LimitValues,
    name_bucket,
)
from holdfast.core.validation import check_name, check_span, check_task_name, did_you_mean, parse_count
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store
from holdfast.tasks import Registry

MAX_OF_ONE = 8
"""Limits of one queue or task."""
_MAX_SHARES = 1000
_TRIES = 20  # writes that lose a race before a change gives up
_OWNED = "code"
_RATE = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,5})?([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PATH = re.compile(r"args(\.[^.\x00-\x1f]{1,64}){1,8}")
_BURST_US = 100_000  # a burst is by default a tenth of a second's worth


class LimitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A limit as code and operators say it.

    queue, task: the jobs it applies to; neither: a bucket that handlers take from, by ``context.limit(name)``.
    by: a path in the payload, like "args.tenant": each value has a bucket of its own, and they take turns.
    concurrency: jobs that run at once. rate: starts, like "10/s", "100/15m"; burst: how many of them may come at once,
    by default a tenth of a second's worth, at least 1.
    weight: the room and tokens that a job takes, or a path in its payload. shares: turns by value of the key.
    depth: jobs that may wait in the queue; submissions beyond it raise `QueueFull`.
    """

    queue: str | None = None
    task: str | None = None
    by: str | None = None
    concurrency: int | None = None
    rate: str | None = None
    burst: int | None = None
    weight: int | str = 1
    shares: Mapping[str, int] | None = None
    depth: int | None = None


_VALUES = ("concurrency", "rate", "burst", "weight", "shares", "depth")


def draft_limit(name: str, options: LimitOptions, *, owner: str | None = None) -> Limit:
    """The limit that these options describe. Raises `Invalid`, naming the field."""
    check_name("limit", name)
    if options.queue is not None and options.task is not None:
        raise Invalid("task", options.task, "give a queue or a task; a job obeys the limits of both")
    if options.by is not None:
        _check_path("by", options.by)
    limit = Limit(
        name=name,
        queue=None if options.queue is None else check_name("queue", options.queue),
        task=None if options.task is None else check_task_name(options.task),
        by=options.by,
        values=parse_values({field: getattr(options, field) for field in _VALUES}),
        owner=owner,
    )
    _check_sense(limit)
    return limit


def _check_sense(limit: Limit) -> None:
    """Raises `Invalid` for a limit that limits nothing."""
    values = limit.values
    of_handlers = limit.queue is None and limit.task is None
    if of_handlers and (values.rate is None or values.concurrency is not None or limit.by is not None):
        raise Invalid("queue", None, "give a queue or a task; a limit that handlers take from has a rate alone")
    if values.shares and limit.by is None:
        raise Invalid("shares", dict(values.shares), "give by too: shares are turns by value of that key")
    if values.depth is not None and (limit.queue is None or limit.by is not None):
        raise Invalid("depth", values.depth, "give it to a queue, in a limit without by")
    if not limit.is_claimed and values.depth is None:
        raise Invalid("concurrency", None, "give concurrency, rate, depth, or by, for keys that take turns")


def parse_values(given: Mapping[str, Any]) -> LimitValues:
    """The numbers of a limit from how they are said. Raises `Invalid`, naming the field."""
    concurrency, rate, burst, weight, shares, depth = (given.get(field) for field in _VALUES)
    number, period_us = (None, 1_000_000) if rate is None else _parse_rate(rate)
    if burst is not None and number is None:
        raise Invalid("burst", burst, "give rate too")
    usual = 1 if number is None else max(1, number * _BURST_US // period_us)
    return LimitValues(
        concurrency=None
        if concurrency is None
        else parse_count(concurrency, "concurrency", least=1, most=MAX_CONCURRENCY, text=False),
        rate=number,
        period_us=period_us,
        burst=usual if burst is None else parse_count(burst, "burst", least=1, most=MAX_CONCURRENCY, text=False),
        weight=_parse_weight(1 if weight is None else weight),
        shares=_parse_shares(shares or {}),
        depth=None if depth is None else parse_count(depth, "depth", least=1, most=MAX_DEPTH, text=False),
    )


def _parse_rate(value: object) -> tuple[int, int]:
    """Number and period in microseconds."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise Invalid("rate", value, 'give starts in a span: "10/s", "90/m", "100/15m", "500/h", "1/d"')
    number, period = int(match[1]), int(match[2] or 1) * _SECONDS[match[3]]
    if number > MAX_RATE * period:
        raise Invalid("rate", value, f"give at most {MAX_RATE:,} a second")
    return number, period * 1_000_000


def format_rate(values: LimitValues) -> str | None:
    """The rate of a limit as it is said: "10/s", "100/15m"."""
    if values.rate is None:
        return None
    seconds = values.period_us // 1_000_000
    unit = next(unit for unit in reversed(_SECONDS) if seconds % _SECONDS[unit] == 0)
    count = seconds // _SECONDS[unit]
    return f"{values.rate}/{'' if count == 1 else count}{unit}"


def _parse_weight(value: object) -> int | str:
    if isinstance(value, str):
        return _check_path("weight", value)
    return parse_count(value, "weight", least=1, most=MAX_WEIGHT, text=False)


def _check_path(field: str, value: object) -> str:
    if not isinstance(value, str) or not _PATH.fullmatch(value):
        raise Invalid(field, value, 'give a place in the payload, like "args.tenant" or "args.order.id"')
    return value


def _parse_shares(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping) or len(value) > _MAX_SHARES:
        raise Invalid("shares", value, f"give at most {_MAX_SHARES} turns by value of the key: {{'acme': 3}}")
    return {str(key): parse_count(share, "shares", least=1, most=MAX_SHARE, text=False) for key, share in value.items()}


def limit_options(options: Mapping[str, Any]) -> LimitOptions:
    """Options by name; raises `Invalid` for a name that is none."""
    known = LimitOptions.__struct_fields__
    unknown = set(options) - set(known)
    if unknown:
        name = min(unknown)
        raise Invalid("option", name, f"there are these: {', '.join(known)}{did_you_mean(name, known)}")
    return LimitOptions(**options)


class LimitOwner(Blocker, Protocol):
    """The application that limits belong to."""

    settings: Settings
    registry: Registry
    events: Events

    async def open_store(self) -> Store: ...

    def forget_limits(self) -> None: ...


class LimitManager:
    """``app.limits``: reads and changes limits while workers obey them."""

    def __init__(self, app: LimitOwner) -> None:
        self._app = app

    @property
    def sync(self) -> BlockingLimits:
        """The same methods for blocking callers: ``app.limits.sync.change("mail", concurrency=10)``."""
        return BlockingLimits(self._app, self)

    @requires_loop
    async def add(self, /, name: str, *, replace_existing: bool = False, **options: Any) -> Limit:
        """Add a limit: ``add("mail", queue="mail", concurrency=20)``. The options are the fields of ``LimitOptions``.

        Raises `Conflict` if there is one of this name, unless ``replace_existing``; one that code declares is changed
        by ``change``.
        """
        draft = draft_limit(name, limit_options(options))
        self._check_argument(draft)

        def new_definition(known: Limit | None) -> Limit:
            if known is None:
                return draft
            if known.owner is not None:
                raise Conflict(f"limit {name} is declared in code; change its values, or choose another name")
            if not replace_existing:
                raise Conflict(f"limit {name} exists; change it, or ask to replace it")
            return replace(draft, revision=known.revision)

        return await self._change(name, new_definition)

    @requires_loop
    async def change(self, /, name: str, **values: Any) -> Limit:
        """Change values of a limit: concurrency, rate, burst, weight, shares. They hold at once, and go before the
        values of the code until ``reset``. None takes one away."""
        unknown = set(values) - set(_VALUES)
        if unknown or not values:
            wrong = min(unknown, default="nothing")
            raise Invalid("value", wrong, f"there are these: {', '.join(_VALUES)}{did_you_mean(wrong, _VALUES)}")

        def with_values(known: Limit | None) -> Limit:
            limit = _there(known, name)
            given = {**said_values(limit.values), **({"burst": None} if "rate" in values else {}), **values}
            declared = limit.declared or (limit.values if limit.owner is not None else None)
            changed = replace(limit, values=parse_values(given), declared=declared)
            _check_sense(changed)
            self._check_argument(changed)
            return changed

        return await self._change(name, with_values)

    @requires_loop
    async def reset(self, name: str) -> Limit:
        """Take the values of the code again. Raises `Conflict` for a limit that no code declares."""

        def as_declared(known: Limit | None) -> Limit:
            limit = _there(known, name)
            if limit.owner is None:
                raise Conflict(f"limit {name} is declared by no code; change it, or remove it")
            return replace(limit, values=limit.declared or limit.values, declared=None)

        return await self._change(name, as_declared)

    @requires_loop
    async def get(self, name: str) -> Limit:
        """The limit of this name; raises `NotFound` if there is none."""
        return await self._get(name)

    async def _get(self, name: str) -> Limit:
        return _there((await self._read()).get(check_name("limit", name)), name)

    async def _read(self) -> dict[str, Limit]:
        return {limit.name: limit for limit in await (await self._app.open_store()).limits.read_limits()}

    @requires_loop
    async def find_all(self) -> list[Limit]:
        """All limits, by name."""
        return list((await self._read()).values())

    @requires_loop
    async def remove(self, name: str) -> None:
        """Remove a limit. One that code declares returns with the next start of a worker."""
        for _ in range(_TRIES):
            known = await self._get(name)
            store = await self._app.open_store()
            if await store.limits.write_limit(LimitChange(known, known.revision, remove=True)) is not None:
                self._app.forget_limits()
                await self._assign(store, known)
                return
        raise Conflict(f"limit {name} is changed by others at this moment; try again")

    @requires_loop
    async def use(self, name: str, *values: Any) -> list[BucketUse]:
        """Use of a limit's bucket; of one with ``by``, of the buckets of these values of the key."""
        buckets = _buckets_of(await self._get(name), values)
        return await (await self._app.open_store()).limits.bucket_use(buckets)

    @requires_loop
    async def pause(self, name: str, pause_for: float | timedelta, *values: Any) -> None:
        """Admit no job through a limit for so long; of one with ``by``, through the buckets of these values."""
        span = check_span(pause_for, "pause_for")
        buckets = _buckets_of(await self._get(name), values)
        await (await self._app.open_store()).limits.pause_buckets(buckets, span)

    async def reconcile(self, declared: Mapping[str, Limit]) -> None:
        """Bring the store in line with the limits that this application's code declares: add, change, remove.

        An operator's limit of the same name stays as it is; so do values that an operator gave a declared one. A limit
        that the code declares no more is removed, but only if the setting ``schedule_owner`` names the application.
        """
        owner = self._app.settings.schedule_owner or _OWNED
        known = await self._read() if not declared else None
        for name, draft in declared.items():
            self._check_argument(draft)
            await self._change(name, _declaring(replace(draft, owner=owner), self._warn))
        if self._app.settings.schedule_owner is None:
            return
        for limit in (known or await self._read()).values():
            if limit.owner == owner and limit.name not in declared:
                store = await self._app.open_store()
                await store.limits.write_limit(LimitChange(limit, limit.revision, remove=True))
                await self._assign(store, limit)

    def _warn(self, name: str, problem: str, remedy: str) -> None:
        self._app.events.emit(DeclarationKept(declared=f"limit {name}", problem=problem, remedy=remedy))

    def _check_argument(self, limit: Limit) -> None:
        """Invalid where a limit of a task that is registered here names an argument that it does not take."""
        task = None if limit.task is None else self._app.registry.get(limit.task)
        for field, path in (("by", limit.by), ("weight", limit.values.weight)):
            if task is not None and isinstance(path, str):
                task.check_argument(path, field)

    async def _change(self, name: str, change: Callable[[Limit | None], Limit]) -> Limit:
        """Writes the limit that ``change`` makes of the present one; again if another write came first."""
        store = await self._app.open_store()
        for _ in range(_TRIES):
            limits = await self._read()
            known = limits.get(name)
            changed = change(known)
            if changed == known:
                return known
            _check_number(limits, changed)
            revision = await store.limits.write_limit(LimitChange(changed, 0 if known is None else known.revision))
            if revision is not None:
                self._app.forget_limits()
                if known is None or _applies_to(known) != _applies_to(changed):
                    await self._assign(store, changed)
                    if known is not None:
                        await self._assign(store, known)
                return replace(changed, revision=revision)
        raise Conflict(f"limit {name} is changed by others at this moment; try again")

    async def _assign(self, store: Store, limit: Limit) -> None:
        """Gives the jobs that wait their partitions under the limits as they are now."""
        if limit.queue is None and limit.task is None:
            return
        _, after = await store.limits.assign_partitions(queue=limit.queue, task=limit.task)
        while after is not None:
            _, after = await store.limits.assign_partitions(queue=limit.queue, task=limit.task, after=after)


class BlockingLimits(BlockingView):
    """``app.limits.sync``: the async methods for blocking callers."""

    __slots__ = ()

    add = BlockingMethod(LimitManager.add)
    change = BlockingMethod(LimitManager.change)
    reset = BlockingMethod(LimitManager.reset)
    get = BlockingMethod(LimitManager.get)
    find_all = BlockingMethod(LimitManager.find_all)
    remove = BlockingMethod(LimitManager.remove)
    use = BlockingMethod(LimitManager.use)
    pause = BlockingMethod(LimitManager.pause)


def said_values(values: LimitValues) -> dict[str, Any]:
    """The values of a limit as they are said; ``parse_values`` reads them back."""
    given = {field: getattr(values, field) for field in ("concurrency", "weight", "shares", "depth")}
    return given | {"rate": format_rate(values), "burst": None if values.rate is None else values.burst}


def scope_buckets(table: LimitTable, scope: str, task: str, queue: str, payload: str) -> list[str]:
    """The buckets of a job that belong to a scope: "key", "queue" or "task"."""
    partition, _ = table.find_partition(task, queue, payload)
    buckets = [] if partition is None else table.split_buckets(partition)
    if scope == "key":
        return [bucket for bucket, limit in buckets if limit.by is not None]
    return [bucket for bucket, limit in buckets if limit.by is None and getattr(limit, scope) is not None]


def _buckets_of(limit: Limit, values: Sequence[Any]) -> list[str]:
    if limit.by is None:
        return [limit.name]
    if not values:
        raise Invalid("values", None, f"give values of {limit.by}: each has a bucket of its own")
    return [name_bucket(limit, value) for value in values]


def _applies_to(limit: Limit) -> tuple[object, ...]:
    return limit.queue, limit.task, limit.by, limit.values.weight


def _check_number(limits: Mapping[str, Limit], changed: Limit) -> None:
    if changed.name not in limits and len(limits) >= MAX_LIMITS:
        raise Invalid("limit", changed.name, f"remove one first: there are {MAX_LIMITS:,}", "is one too many")
    place = (changed.queue, changed.task)
    others = [each for each in limits.values() if (each.queue, each.task) == place and each.name != changed.name]
    if place != (None, None) and len(others) >= MAX_OF_ONE:
        names = ", ".join(sorted(each.name for each in others))
        raise Invalid("limit", changed.name, f"its queue or task has {MAX_OF_ONE} limits: {names}", "is one too many")


def _declaring(draft: Limit, warn: Callable[[str, str, str], None]) -> Callable[[Limit | None], Limit]:
    def declared_over(known: Limit | None) -> Limit:
        if known is None:
            return draft
        if known.owner != draft.owner:
            by = "an operator made it" if known.owner is None else f"the code of {known.owner} declares it"
            warn(known.name, f"{by}, and so it stays", "remove it, or give the one in your code another name")
            return known
        if known.declared is None:
            return replace(draft, revision=known.revision)
        return replace(draft, values=known.values, declared=draft.values, revision=known.revision)

    return declared_over


def _there(known: Limit | None, name: str) -> Limit:
    if known is None:
        raise NotFound(f"there is no limit {name}")
    return known
