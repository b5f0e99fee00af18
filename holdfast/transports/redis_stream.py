"""A stream of ids for each queue, read by one consumer group; an entry is acknowledged and deleted once its job is
settled. What a consumer that died had in hand goes to another consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from redis import exceptions as driver

from holdfast.core.models import Delivery
from holdfast.stores.connections.redis_protocol import Argument
from holdfast.stores.connections.redis_url import Server
from holdfast.transports.base import BlockingReader, RedisTransport, text_of
from holdfast.transports.keys import TransportKeys

GROUP = "holdfast"
_PAUSE = 0.05  # seconds before a stream that has just gone is made again


class RedisStream(RedisTransport):
    """``silence``: after so long without a sign of life a consumer's deliveries are taken over."""

    kind = "stream"

    def __init__(self, server: Server, names: TransportKeys, consumer: str, *, silence: timedelta) -> None:
        super().__init__(server, names, consumer)
        self._silence = silence // timedelta(milliseconds=1)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        await self._run_on_receipts("done", deliveries)

    async def set_aside(self, deliveries: Sequence[Delivery]) -> str:
        await self._run_on_receipts("set_aside", deliveries)
        return self.names.malformed

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        await self._run_on_receipts("touch", deliveries)

    async def _run_on_receipts(self, name: str, deliveries: Sequence[Delivery]) -> None:
        receipts: dict[str, list[Argument]] = {}
        for each in deliveries:
            if each.receipt:
                receipts.setdefault(each.queue, []).append(each.receipt)
        await self.run_grouped(name, receipts)

    async def reclaim(self) -> list[Delivery]:
        return await self.maintain_queues(self._silence)

    async def _block(
        self, ear: BlockingReader, queues: Sequence[str], seconds: float, stop: asyncio.Event
    ) -> list[Delivery] | None:
        keys = [self.key_of(queue) for queue in queues]
        words = ("GROUP", GROUP, self.consumer, "COUNT", 1, "BLOCK", max(1, int(seconds * 1000)), "STREAMS")
        try:
            reply = await ear.read_blocking(
                "XREADGROUP", *words, *keys, *([">"] * len(keys)), seconds=seconds, stop=stop
            )
        except driver.ResponseError as error:
            if "NOGROUP" not in str(error) and "UNBLOCKED" not in str(error):
                raise
            await self.run("prepare", *(queue for queue in queues if queue))
            await asyncio.sleep(_PAUSE)
            return None
        found = []
        for key, entries in reply or ():
            for receipt, fields in entries:
                found.append(Delivery(_id(fields), self.queue_of(key), receipt.decode()))
        rung = [each.receipt for each in found if not each.queue]
        if rung:
            await self.links.run_command("XACK", self.key_of(""), GROUP, *rung)
            await self.links.run_command("XDEL", self.key_of(""), *rung)
        return [each for each in found if each.queue] if found else None


def _id(fields: Sequence[bytes]) -> str:
    """Field ``id`` of an entry; of another program's entry all its fields."""
    return text_of(dict(zip(fields[::2], fields[1::2], strict=False)).get(b"id", b" ".join(fields)))
