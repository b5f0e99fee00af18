"""The HTTP API of the service: `uvicorn streams.notifications.api:site`. It shows and changes the rate limit, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, HTTPException
from pydantic import Field
from redis.exceptions import RedisError

from holdfast.integrations.fastapi import StrictRoute
from streams.notifications.tasks import BUCKET, app
from streams.notifications.token_bucket import MAX_NUMBER, MIN_CAPACITY, MIN_REFILL, Limit, TokenBucket
from streams.resources import open_client
from streams.service import create_service
from streams.sites import StrictBody

bucket = TokenBucket(open_client(app), BUCKET)
router = APIRouter(route_class=StrictRoute, tags=["Rate limit"])


class RateLimit(StrictBody):
    """The limit of calls to the provider."""

    capacity: float = Field(ge=MIN_CAPACITY, le=MAX_NUMBER, description="Calls that may be made at once.")
    refill: float = Field(ge=MIN_REFILL, le=MAX_NUMBER, description="Further calls per second.")


@router.get("/limit")
async def show_limit() -> RateLimit:
    """Shows the limit."""
    with redis_may_be_away():
        limit = await bucket.read_limit()
    return RateLimit(capacity=limit.capacity, refill=limit.refill)


@router.put("/limit")
async def change_limit(wanted: RateLimit) -> RateLimit:
    """Changes the limit; all workers follow with their next call."""
    with redis_may_be_away():
        await bucket.change_limit(Limit(wanted.capacity, wanted.refill))
    return wanted


@contextmanager
def redis_may_be_away() -> Iterator[None]:
    """Turns the failure to reach Redis into an answer 503."""
    try:
        yield
    except RedisError:
        detail = "Redis, which keeps the limit, does not answer; try again later"
        raise HTTPException(503, detail, {"Retry-After": "2"}) from None


site = create_service(app, router)
