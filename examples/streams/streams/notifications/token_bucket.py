"""A token bucket in Redis, shared by all workers. Its capacity and its refill can be changed at run time."""

from __future__ import annotations

import os
from typing import NamedTuple

from redis.asyncio import Redis

from holdfast import ConfigError
from streams.errors import RateLimitExceeded

MIN_CAPACITY, MIN_REFILL, MAX_NUMBER = 1, 0.001, 1e9
FILL = """
-- KEYS: the bucket, a hash. ARGV: capacity and refill per second unless the hash has its own.
local now = redis.call('TIME')
now = now[1] + now[2] / 1000000
local bucket = redis.call('HMGET', KEYS[1], 'capacity', 'refill', 'tokens', 'at')
local capacity, refill = tonumber(bucket[1] or ARGV[1]), tonumber(bucket[2] or ARGV[2])
local elapsed = math.max(0, now - (tonumber(bucket[4]) or now))
local tokens = math.min(capacity, (tonumber(bucket[3]) or capacity) + elapsed * refill)
"""
TAKE = (
    FILL
    + """
-- Returns whether a token was taken, and the time of this decision.
local granted = tokens >= 1
if granted then tokens = tokens - 1 end
redis.call('HSET', KEYS[1], 'tokens', string.format('%.17g', tokens), 'at', string.format('%.6f', now))
return {granted and 1 or 0, string.format('%.6f', now)}
"""
)
CHANGE = (
    FILL
    + """
-- ARGV, further: the new capacity and refill. What the old refill has given until now stays, up to the new capacity.
tokens = math.min(tokens, tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], 'capacity', ARGV[3], 'refill', ARGV[4],
    'tokens', string.format('%.17g', tokens), 'at', string.format('%.6f', now))
"""
)


class Limit(NamedTuple):
    """Calls at once (capacity), and further calls each second (refill)."""

    capacity: float
    refill: float


def read_default() -> Limit:
    """Returns the limit of a bucket that was never changed; ConfigError names a wrong environment variable."""
    capacity = _read_number("BUCKET_CAPACITY", "10", least=MIN_CAPACITY)
    return Limit(capacity, _read_number("BUCKET_REFILL", "5", least=MIN_REFILL))


def _read_number(name: str, default: str, *, least: float) -> float:
    text = os.environ.get(name) or default
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not least <= number <= MAX_NUMBER:
        raise ConfigError(f"{name}: {text!r} is not valid; give a number from {least:g} to 1e9")
    return number


DEFAULT = read_default()


class TokenBucket:
    """In any span of ``t`` seconds at most ``capacity + refill * t`` calls of ``take`` return."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis = redis
        self._key = key
        self._take = redis.register_script(TAKE)

    async def take(self) -> float:
        """Takes a token; returns the time, by the clock of Redis. RateLimitExceeded: there is none."""
        granted, at = await self._take(keys=[self._key], args=list(DEFAULT))
        if not granted:
            limit = await self.read_limit()
            raise RateLimitExceeded(
                f"rate limited: more than {limit.capacity:g} calls, and {limit.refill:g} per second"
            )
        return float(at)

    async def read_limit(self) -> Limit:
        """Returns the limit that is in force."""
        values = await self._redis.hmget(self._key, "capacity", "refill")
        return Limit(
            *(float(default if value is None else value) for value, default in zip(values, DEFAULT, strict=True))
        )

    async def change_limit(self, limit: Limit) -> None:
        """Sets the limit for all workers, from their next call on. A Redis that loses its data forgets it."""
        await self._redis.eval(CHANGE, 1, self._key, *DEFAULT, *limit)
