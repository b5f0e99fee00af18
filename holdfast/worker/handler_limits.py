"""Limits as handlers use them: tokens of shared buckets, and pauses after ``RetryAfter`` with a scope."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from msgspec.structs import replace

from holdfast.app.limits import scope_buckets
from holdfast.core.errors import HoldfastError, Invalid, RateLimited
from holdfast.core.lifecycle import Failed
from holdfast.core.limits import MAX_WEIGHT
from holdfast.core.models import Job
from holdfast.core.validation import did_you_mean, format_duration, parse_count
from holdfast.stores.base import Store
from holdfast.stores.common.limit_cache import LimitCache
from holdfast.worker.context import WorkerState

_MAX_WAIT = 5.0  # seconds after which a handler that waits asks again: the limit may have been changed or resumed
_CANCEL_CHECK_SECONDS = 0.5  # in which a thread that waits notices that its job is asked to stop


class HandlerLimits:
    """Rate limits of the store, for the handlers of one worker."""

    def __init__(self, shared: WorkerState, store: Store) -> None:
        self._shared = shared
        self._store = store
        self._loop = asyncio.get_running_loop()  # the store's
        self._cache = LimitCache(store.limits.read_limits)

    async def take(self, name: str, tokens: int, *, wait: bool) -> None:
        """Takes tokens of a limit; `RateLimited` if there are too few, unless ``wait``: then waits for them."""
        while delay := await self._try_to_take(name, tokens):
            if not wait:
                raise _too_few(name, delay)
            await self._shared.clock.sleep(min(delay.total_seconds(), _MAX_WAIT))

    def take_blocking(self, name: str, tokens: int, *, wait: bool, is_cancelled: Callable[[], bool]) -> None:
        """Takes tokens for a handler in a thread, like ``take``. A wait ends when the job is asked to stop."""
        while delay := asyncio.run_coroutine_threadsafe(self._try_to_take(name, tokens), self._loop).result():
            clock = self._shared.clock
            ready_at = clock.monotonic() + min(delay.total_seconds(), _MAX_WAIT)
            while (left := ready_at - clock.monotonic()) > 0:
                if not wait or is_cancelled():
                    raise _too_few(name, delay)
                sleeping = clock.sleep(min(left, _CANCEL_CHECK_SECONDS))
                asyncio.run_coroutine_threadsafe(sleeping, self._loop).result()

    async def _try_to_take(self, name: str, tokens: int) -> timedelta:
        parse_count(tokens, "tokens", least=1, most=MAX_WEIGHT, text=False)
        if name not in (await self._cache.current_limits()).limits:
            self._cache.mark_stale()  # it may have been added since
        limit = (await self._cache.current_limits()).limits.get(name)
        if limit is None or limit.values.rate is None or limit.by is not None:
            usable = [each.name for each in self._cache.table.limits.values() if each.values.rate and not each.by]
            remedy = f'there is no such limit; declare one: app.limit("{name}", rate="10/s")'
            if limit is not None:
                remedy = 'declare another, with a rate alone: app.limit("…", rate="10/s")'
            remedy += did_you_mean(name, usable)
            raise Invalid("limit", name, remedy)
        return await self._store.limits.take_tokens(name, tokens)

    async def pause_scope(self, job: Job, failed: Failed) -> Failed:
        """Pauses the limits that a failed handler asked to pause; returns its outcome, which says so."""
        if (scope := failed.pause) is None or not failed.delay:
            return failed
        try:
            (row,) = await self._store.query.summaries([job.id])  # a claim does not tell the partition
            self._cache.mark_stale()  # its limit may have been added since
            buckets = scope_buckets(await self._cache.current_limits(), scope, row.partition if row else None)
            if buckets:
                await self._store.limits.pause_buckets(buckets, failed.delay)
        except HoldfastError as error:
            return replace(failed, error=f"{failed.error}; its {scope} could not be paused: {error}")
        note = f"paused: {', '.join(buckets)}" if buckets else f"nothing was paused: no limit applies to its {scope}"
        return replace(failed, error=f"{failed.error}; {note}")


def _too_few(name: str, delay: timedelta) -> RateLimited:
    rounded = timedelta(milliseconds=max(1, round(delay.total_seconds() * 1000)))
    return RateLimited(f"rate limited: limit {name} has too few tokens for the next {format_duration(rounded)}")
