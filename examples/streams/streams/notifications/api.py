"""The HTTP API of the service: `uvicorn streams.notifications.api:site`. It shows and changes the rate limit, too."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from streams.notifications.tasks import BUCKET, app
from streams.notifications.token_bucket import Limit, TokenBucket
from streams.resources import open_client
from streams.service import create_service

bucket = TokenBucket(open_client(app), BUCKET)
router = APIRouter(tags=["Rate limit"])


class RateLimit(BaseModel):
    """The limit of calls to the provider."""

    capacity: float = Field(ge=1, description="Calls that may be made at once.")
    refill: float = Field(gt=0, description="Further calls per second.")


@router.get("/limit")
async def show_limit() -> RateLimit:
    """Shows the limit."""
    limit = await bucket.read_limit()
    return RateLimit(capacity=limit.capacity, refill=limit.refill)


@router.put("/limit")
async def change_limit(wanted: RateLimit) -> RateLimit:
    """Changes the limit; all workers follow with their next call."""
    await bucket.change_limit(Limit(wanted.capacity, wanted.refill))
    return wanted


site = create_service(app, router)
