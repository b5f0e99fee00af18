"""A list of ids for each queue, pushed on the left and popped from the right: first in, first out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.core.models import Delivery
from holdfast.transports.base import BlockingReader, RedisTransport, text_of


class RedisList(RedisTransport):
    """Forgets popped ids: a job whose id was lost on its way is announced again by the next sweep."""

    kind = "list"

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        return

    async def set_aside(self, deliveries: Sequence[Delivery]) -> str:
        return ""

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        return

    async def reclaim(self) -> list[Delivery]:
        return await self.maintain_queues(0)

    async def _block(
        self, ear: BlockingReader, queues: Sequence[str], seconds: float, stop: asyncio.Event
    ) -> list[Delivery] | None:
        keys = [self.key_of(queue) for queue in queues]
        reply = await ear.read_blocking("BRPOP", *keys, f"{max(0.01, seconds):.3f}", seconds=seconds, stop=stop)
        if reply is None:
            return None
        key, job_id = reply
        queue = self.queue_of(key)
        return [Delivery(text_of(job_id), queue)] if queue else []
