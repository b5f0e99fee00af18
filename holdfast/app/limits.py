"""Limits of an application: declared in code or settings, or made and changed at run time by Python, CLI and HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from holdfast.app.sync import Blocker, BlockingMethod, BlockingView
from holdfast.core.encryption import Codec
from holdfast.core.errors import ConfigError, Conflict, Invalid, NotFound
from holdfast.core.events import DeclarationIgnored, Events
from holdfast.core.limit_options import (
    VALUE_OPTIONS,
    check_has_effect,
    draft_limit,
    format_values,
    has_default_burst,
    limit_options,
    parse_values,
)
from holdfast.core.limits import MAX_LIMITS, BucketUse, Limit, LimitChange, LimitTable, name_bucket, parse_value
from holdfast.core.portal import requires_loop
from holdfast.core.schedule import Schedule
from holdfast.core.validation import check_name, check_options, check_span
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store
from holdfast.tasks import Registry

MAX_OF_ONE = 8
"""Limits of one queue or task."""
_TRIES = 20  # writes that lose a race before a change gives up
_OWNED = "code"

Definition = TypeVar("Definition", Limit, Schedule)


class LimitOwner(Blocker, Protocol):
    """The application that limits belong to."""

    settings: Settings
    registry: Registry
    events: Events
    codec: Codec | None
    readable: frozenset[str]

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
            check_replacement(f"limit {name}", known, replace_existing=replace_existing)
            return replace(draft, revision=known.revision)

        return await self._change(name, new_definition)

    @requires_loop
    async def change(self, /, name: str, **values: Any) -> Limit:
        """Change values of a limit: concurrency, rate, burst, weight, shares, depth. They hold at once, and go before
        the declared values until ``reset``. None takes one away; a default burst follows rate and weight."""
        check_options(values or ["nothing"], VALUE_OPTIONS, "value")

        def with_values(known: Limit | None) -> Limit:
            limit = found_definition(known, f"limit {name}")
            follows = has_default_burst(limit.values) or values.get("rate", "") is None
            given = format_values(limit.values) | ({"burst": None} if follows else {}) | values
            declared = limit.declared or (limit.values if limit.owner is not None else None)
            changed = replace(limit, values=parse_values(given), declared=declared)
            if limit.queue is limit.task is None:
                _check_handler_values(changed, values)
            check_has_effect(changed)
            self._check_argument(changed)
            return changed

        return await self._change(name, with_values)

    @requires_loop
    async def reset(self, name: str) -> Limit:
        """Take the values of the code again. Raises `Conflict` for a limit that no code declares."""

        def as_declared(known: Limit | None) -> Limit:
            limit = found_definition(known, f"limit {name}")
            if limit.owner is None:
                raise Conflict(f"an operator made limit {name}, so it has no values of the code; change or remove it")
            return replace(limit, values=limit.declared or limit.values, declared=None)

        return await self._change(name, as_declared)

    @requires_loop
    async def get(self, name: str) -> Limit:
        """The limit of this name; raises `NotFound` if there is none."""
        return await self._get(name)

    async def _get(self, name: str) -> Limit:
        return found_definition((await self._read()).get(check_name("limit", name)), f"limit {name}")

    async def _read(self) -> dict[str, Limit]:
        return {limit.name: limit for limit in await (await self._app.open_store()).limits.read_limits()}

    @requires_loop
    async def find_all(self) -> list[Limit]:
        """All limits, by name."""
        return list((await self._read()).values())

    @requires_loop
    async def remove(self, name: str) -> None:
        """Remove a limit. One that code declares returns with the next start of a worker."""
        await self._change(
            check_name("limit", name), lambda known: found_definition(known, f"limit {name}"), remove=True
        )

    @requires_loop
    async def use(self, name: str, *values: Any) -> list[BucketUse]:
        """Use of a limit's bucket; of one with ``by``, of the buckets of these values of the key."""
        buckets = _buckets_of(await self._get(name), values)
        return await (await self._app.open_store()).limits.bucket_use(buckets)

    @requires_loop
    async def find_paused(self) -> list[BucketUse]:
        """Paused limits, without those that have a bucket for each value of a key."""
        names = [limit.name for limit in (await self._read()).values() if limit.by is None]
        uses = await (await self._app.open_store()).limits.bucket_use(names) if names else []
        return [use for use in uses if use.paused]

    @requires_loop
    async def pause(self, name: str, pause_for: float | timedelta, *values: Any) -> None:
        """Admit no job through a limit for so long; of one with ``by``, through the buckets of these values.

        A later pause makes it longer, never shorter; ``resume`` ends it."""
        span = check_span(pause_for, "pause_for")
        buckets = _buckets_of(await self._get(name), values)
        if span:
            await (await self._app.open_store()).limits.pause_buckets(buckets, span)

    @requires_loop
    async def resume(self, name: str, *values: Any) -> Limit:
        """End a pause, of an operator or of `RetryAfter`; of a limit with ``by``, in the buckets of these values."""
        limit, store = await self._get(name), await self._app.open_store()
        await store.limits.pause_buckets(_buckets_of(limit, values), timedelta(0))
        for _ in range(_TRIES):
            revision = await store.limits.write_limit(LimitChange(limit, limit.revision))
            if revision is not None:
                return replace(limit, revision=revision)
            limit = await self._get(name)
        raise lost_race(f"limit {name}")

    def check_declared(self, declared: Mapping[str, Limit]) -> None:
        """Raises `ConfigError` for a limit that names an argument which its task does not take."""
        for problem in self.declared_problems(declared):
            raise ConfigError(problem)

    def declared_problems(self, declared: Mapping[str, Limit]) -> Iterator[str]:
        """Yields text for each limit that names an argument which its task does not take."""
        for name, limit in declared.items():
            try:
                self._check_argument(limit)
            except Invalid as error:
                yield f"limit {name}: {error}"

    async def reconcile(self, declared: Mapping[str, Limit]) -> None:
        """Bring the store in line with the limits that code and settings of this application declare: add, change,
        remove.

        An operator's limit of the same name stays as it is; so do values that an operator gave a declared one. A limit
        that neither declares any more is removed, but only if the setting ``schedule_owner`` names the application.
        """
        owner = self._app.settings.schedule_owner or _OWNED
        refused = [draft for draft in declared.values() if await self._declare(draft, owner)]
        if self._app.settings.schedule_owner is not None:
            for limit in (await self._read()).values():
                if limit.owner == owner and limit.name not in declared:
                    await self._withdraw(limit.name, owner)
        for draft in refused:  # one that was removed just now may have stood in its way
            if problem := await self._declare(draft, owner):
                warn_ignored(f"limit {draft.name}", problem, self._app.events)

    async def _withdraw(self, name: str, owner: str) -> None:
        with suppress(NotFound):
            await self._change(name, lambda found: found_own(found, owner, f"limit {name}"), remove=True)

    async def _declare(self, draft: Limit, owner: str) -> str:
        """Puts a declared limit in force; returns why it cannot be, or nothing."""
        try:
            self._check_argument(draft)
            await self._change(draft.name, _declaring(replace(draft, owner=owner), self._app.events))
        except (Invalid, Conflict) as error:
            return str(error)
        return ""

    async def resume_assignments(self, seen: Mapping[str, int]) -> dict[str, int]:
        """Gives jobs the partitions that a process which ended too early left to do.

        ``seen``: the result of the call before. An unfinished limit that has not changed since is taken over; the
        result holds the revisions of all that are unfinished.
        """
        unfinished = [limit for limit in (await self._read()).values() if limit.unassigned]
        for limit in unfinished:
            if seen.get(limit.name) == limit.revision:
                await _finish_assignment(await self._app.open_store(), limit)
        return {limit.name: limit.revision for limit in unfinished}

    def _check_argument(self, limit: Limit) -> None:
        """Invalid where a limit of a task that is registered here names an argument that it does not take, or one that
        is encrypted."""
        task = None if limit.task is None else self._app.registry.get(limit.task)
        for field, path in (("by", limit.by), ("weight", limit.values.weight)):
            if not isinstance(path, str):
                continue
            if task is not None:
                task.check_argument(path, field)
            if self._app.codec is not None and path.removeprefix("args.").split(".")[0] not in self._app.readable:
                remedy = "stores read it, and payloads are encrypted: name the argument in Holdfast(…, readable=[…])"
                raise Invalid(field, path, remedy)

    async def _change(self, name: str, change: Callable[[Limit | None], Limit], *, remove: bool = False) -> Limit:
        """Writes, or removes, the limit that ``change`` makes of the present one; again if another write came first."""
        store = await self._app.open_store()
        for attempt in range(_TRIES):
            limits = await self._read()
            known = limits.get(name)
            changed = change(known)
            if remove:
                if await store.limits.write_limit(LimitChange(changed, changed.revision, remove=True)) is None:
                    continue
                self._app.forget_limits()
                await _assign(store, changed.queue, changed.task)
                return changed
            changed = replace(changed, unassigned=_unassigned_places(known, changed))
            if changed != known:
                _check_number(limits, changed)
                expected = -(attempt % 2) if known is None else known.revision  # the next time replaces a spoiled one
                revision = await store.limits.write_limit(LimitChange(changed, expected))
                if revision is None:
                    continue
                self._app.forget_limits()
                changed = replace(changed, revision=revision)
            return await _finish_assignment(store, changed)
        raise lost_race(f"limit {name}")


async def _finish_assignment(store: Store, limit: Limit) -> Limit:
    """Gives the jobs of a limit their partitions, and takes back its mark that this is to be done."""
    left = [await _assign(store, *target) for target in limit.unassigned]
    if not left or any(left):
        return limit
    done = replace(limit, unassigned=())
    revision = await store.limits.write_limit(LimitChange(done, limit.revision))
    return limit if revision is None else replace(done, revision=revision)  # None: another write has the mark now


async def _assign(store: Store, queue: str | None, task: str | None) -> int:
    """Gives jobs their partitions by the limits there are now. Returns how many were left out."""
    left, after = 0, "" if queue or task else None
    while after is not None:
        step = await store.limits.assign_partitions(queue=queue, task=task, after=after)
        left, after = left + step.left, step.after
    return left


class BlockingLimits(BlockingView):
    """``app.limits.sync``: the async methods for blocking callers."""

    __slots__ = ()

    add = BlockingMethod(LimitManager.add)
    change = BlockingMethod(LimitManager.change)
    reset = BlockingMethod(LimitManager.reset)
    get = BlockingMethod(LimitManager.get)
    find_all = BlockingMethod(LimitManager.find_all)
    find_paused = BlockingMethod(LimitManager.find_paused)
    remove = BlockingMethod(LimitManager.remove)
    use = BlockingMethod(LimitManager.use)
    pause = BlockingMethod(LimitManager.pause)
    resume = BlockingMethod(LimitManager.resume)


def merge_limits(declared: Mapping[str, Limit], settings: Settings) -> dict[str, Limit]:
    """Limits that code and settings declare; raises `ConfigError` for a name that both do."""
    for name in sorted(declared.keys() & settings.limits.keys()):
        sources = f"the code and as limits.{name} in {settings.source_of('limits').partition(':')[0]}"
        raise ConfigError(f"limit {name!r} is declared in {sources}; remove one of them, or give it another name")
    return {**settings.limits, **declared}


def scope_buckets(table: LimitTable, scope: str, partition: str | None) -> list[str]:
    """The buckets of a partition that belong to a scope: "key", "queue" or "task"."""
    buckets = [] if partition is None else table.buckets_with_limits(partition)
    if scope == "key":
        return [bucket for bucket, limit in buckets if limit.by is not None]
    return [bucket for bucket, limit in buckets if limit.by is None and getattr(limit, scope) is not None]


def _buckets_of(limit: Limit, values: Sequence[Any]) -> list[str]:
    if limit.by is None:
        return [limit.name]
    if not values:
        raise Invalid("values", None, f"give values of {limit.by}: each has a bucket of its own", "is missing")
    return [name_bucket(limit, parse_value(value)) for value in values]


def _check_handler_values(changed: Limit, values: Mapping[str, Any]) -> None:
    """Raises `Invalid` for values that a limit without queue and task cannot have."""
    for field, value in values.items():
        if field in ("concurrency", "depth") or (field == "rate" and changed.values.rate is None):
            raise Invalid(field, value, f"limit {changed.name} is of handlers, which take tokens: it has a rate alone")


def _unassigned_places(known: Limit | None, changed: Limit) -> tuple[tuple[str | None, str | None], ...]:
    """Queues and tasks whose jobs need new partitions once a limit is changed, with those that needed them before."""
    targets = set(known.unassigned if known is not None else ())
    if _applies_to(known) != _applies_to(changed):
        targets |= {(each.queue, each.task) for each in (known, changed) if each is not None and _applies_to(each)}
    return tuple(sorted(targets, key=str))


def _applies_to(limit: Limit | None) -> tuple[object, ...] | None:
    """The fields that decide the partitions of jobs; None for a limit that gives them none."""
    if limit is None or not limit.has_buckets or limit.queue is limit.task is None:
        return None
    return limit.queue, limit.task, limit.by, limit.values.weight, limit.is_counted


def _check_number(limits: Mapping[str, Limit], changed: Limit) -> None:
    if changed.name not in limits and len(limits) >= MAX_LIMITS:
        raise Invalid("limit", changed.name, f"remove one first: there are {MAX_LIMITS:,}", "is one too many")
    target = (changed.queue, changed.task)
    others = [each for each in limits.values() if (each.queue, each.task) == target and each.name != changed.name]
    if target != (None, None) and len(others) >= MAX_OF_ONE:
        names = ", ".join(sorted(each.name for each in others))
        raise Invalid("limit", changed.name, f"its queue or task has {MAX_OF_ONE} limits: {names}", "is one too many")
    for name in [each.name for each in others if each.is_counted and changed.is_counted]:
        remedy = f"limit {name} has one; a queue has one limit with by and depth, a task has one with depth"
        raise Invalid("depth", changed.values.depth, remedy, "is one too many")


def _declaring(draft: Limit, events: Events) -> Callable[[Limit | None], Limit]:
    def declared_over(known: Limit | None) -> Limit:
        if known is None:
            return draft
        if known.owner != draft.owner:
            warn_of_foreign(f"limit {known.name}", known, events)
            return known
        if known.declared is None:
            return replace(draft, revision=known.revision)
        return replace(draft, values=known.values, declared=draft.values, revision=known.revision)

    return declared_over


# ── common to limits and schedules ──────────────────────────────────────────────────────────────────────────────────
def found_definition(known: Definition | None, what: str) -> Definition:
    """Returns what was found; raises `NotFound` if nothing was."""
    if known is None:
        raise NotFound(f"there is no {what}; `holdfast {what.partition(' ')[0]} list` has those that there are")
    return known


def found_own(known: Definition | None, owner: str | None, what: str) -> Definition:
    """Returns what was found; raises `NotFound` if nothing was, or if it is another owner's by now."""
    return found_definition(known if known is not None and known.owner == owner else None, what)


def check_replacement(what: str, known: Limit | Schedule, *, replace_existing: bool) -> None:
    """Raises `Conflict` where one that exists may not be replaced."""
    if known.owner is not None:
        raise Conflict(f"{what} is declared in code; change it there, or choose another name")
    if not replace_existing:
        raise Conflict(f"{what} exists; change or remove it, or replace it (--replace, replace_existing=True)")


def lost_race(what: str) -> Conflict:
    """Returns the error of a change that others came before, each time."""
    return Conflict(f"{what} is changed by others at this moment; try again")


def warn_ignored(what: str, problem: str, events: Events, remedy: str = "correct it, and restart the worker") -> None:
    """Emits that a declaration has no effect."""
    events.emit(DeclarationIgnored(declared=what, problem=problem, remedy=remedy))


def warn_of_foreign(what: str, known: Limit | Schedule, events: Events) -> None:
    """Emits that a declaration has no effect, since another application or an operator has one of its name."""
    by = "an operator made it" if known.owner is None else f"the code of {known.owner} declares it"
    warn_ignored(what, f"{by}, and so it stays", events, "remove it, or give the one in your code another name")
