"""Classification of errors: transient ones are retried, all others go to the dead letters at once."""

from __future__ import annotations

import asyncpg
import httpx
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from holdfast import Unavailable


class RateLimitExceeded(Exception):
    """The token bucket is empty. The message says "rate limited"."""


class UpstreamUnavailable(Exception):
    """Another service answered 408, 425, 429 or 5xx."""


class UpstreamRefused(Exception):
    """Another service refused the request with another 4xx: the same request would be refused again."""


TRANSIENT = (
    RateLimitExceeded,
    UpstreamUnavailable,
    Unavailable,
    OSError,  # includes TimeoutError, refused connections and failed name lookups
    httpx.TransportError,
    RedisConnectionError,
    RedisTimeoutError,
    asyncpg.InterfaceError,  # a pooled connection was closed
    asyncpg.InternalClientError,  # it was cut during a statement, and the rollback found it so
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # the server is shutting down or starting
    asyncpg.InsufficientResourcesError,
    asyncpg.TransactionRollbackError,  # a deadlock or a serialization failure
)
"""Errors that are retried. Validation and logic errors are in no class of this list."""


def raise_for_status(response: httpx.Response) -> None:
    """Raises UpstreamUnavailable or UpstreamRefused for an error status."""
    if response.is_success:
        return
    request = response.request
    message = f"{request.method} {request.url} answered {response.status_code}: {response.text[:300]}"
    if response.status_code in (408, 425, 429) or response.status_code >= 500:
        raise UpstreamUnavailable(message)
    raise UpstreamRefused(message)
