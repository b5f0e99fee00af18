"""Rate limits over all workers: AtlasQueue plans them for its second version. Redis keeps the place in the queue."""

from __future__ import annotations

import asyncio
from functools import cached_property

from redis.asyncio import Redis
from redis.exceptions import RedisError

from holdfast import Snooze

_HELD = 1.0  # seconds for which a job that is early keeps its worker waiting; beyond, it is put back
_TAKE = """
local now = redis.call('TIME')
now = now[1] * 1000000 + now[2]
local interval, held = tonumber(ARGV[1]), tonumber(ARGV[2])
local mine = tonumber(redis.call('GET', KEYS[2]))
if not mine or mine < now - held then
    mine = math.max(now, tonumber(redis.call('GET', KEYS[1]) or 0))
    local next = string.format('%.0f', mine + interval)
    redis.call('SET', KEYS[1], next, 'PX', math.ceil((mine + interval - now) / 1000))
end
if mine - now <= held then
    redis.call('DEL', KEYS[2])
else
    redis.call('SET', KEYS[2], string.format('%.0f', mine), 'PX', math.ceil((mine + held - now) / 1000))
end
return math.max(0, mine - now)
"""
"""The microseconds until this job's turn: one comes every ``interval``, and who has to wait long is remembered."""


class Limiter:
    """Lets so many jobs a second begin, in whichever worker."""

    def __init__(self, url: str, prefix: str) -> None:
        self._url, self._prefix = url, prefix

    @cached_property
    def _redis(self) -> Redis:
        return Redis.from_url(self._url, socket_timeout=5, socket_connect_timeout=5)

    async def turn(self, name: str, per_second: float, job_id: str) -> None:
        """Return when it is this job's turn; Snooze where that is later than a moment, or unknown."""
        keys = [f"{self._prefix}:rate:{name}", f"{self._prefix}:turn:{job_id}"]
        try:
            interval, held = round(1_000_000 / per_second), round(_HELD * 1_000_000)
            left = int(await self._redis.eval(_TAKE, len(keys), *keys, interval, held)) / 1_000_000
        except RedisError:
            raise Snooze(_HELD) from None
        if left > _HELD:
            raise Snooze(left - _HELD / 2)
        await asyncio.sleep(left)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._redis.aclose()
