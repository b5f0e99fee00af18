"""The transports over Redis: a list of ids a queue, or a stream that a consumer group reads; keys, scripts, lock."""

from __future__ import annotations

import asyncio
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

from redis import exceptions as driver

from holdfast.core.errors import ConfigError, Unavailable
from holdfast.core.models import Overtaken
from holdfast.stores.common.waiters import run_within
from holdfast.stores.connections.redis import RedisPool, Script, load_scripts, split_parts
from holdfast.stores.connections.redis_protocol import Argument, RedisConnection
from holdfast.stores.connections.redis_url import Server, parse_server
from holdfast.transports.contract import Delivery, TransportKeys

RECONNECT_TIMEOUT = 0.3  # seconds a call waits for a server that is away: enough to reconnect
CALL_DEADLINE = 1.5  # seconds a call may take: a submission waits for no more, and over HTTP is answered within two
_PART = 1000  # ids per call of a script
_QUEUES_PER_CALL = 20  # queues per call of ``maintain``
_MAX_WATCHED = 128  # queues that a consumer of every queue blocks on
_BLOCK = 15.0  # seconds of one blocking command, which proves the connection alive
_BLOCK_MARGIN = 5.0  # seconds for its answer once it ends, by itself or unblocked
_UNBLOCK_INTERVAL = 0.05  # seconds between tries to unblock a reader
_LOCKED = 10_000  # milliseconds until the lock of a sweep expires

_TROUBLE = (OSError, TimeoutError, EOFError, driver.RedisError)


def server_of(url: str, names: TransportKeys) -> Server:
    """Returns the transport's server; raises ConfigError for keys that a cluster would not keep together."""
    server, _ = parse_server(url, field="transport_url")
    if server.kind == "cluster":
        tags = {found[1] if (found := re.search(r"\{([^}]+)\}", key)) else "" for key in names}
        if len(tags) > 1 or "" in tags:
            raise ConfigError(
                f"transport_key: {names.key!r} and transport_dead_key {names.dead_key!r} must have the same {{tag}}: "
                "in a cluster all keys must be in one hash slot"
            )
    return server


def scripts_of(kind: str) -> Mapping[str, Script]:
    """The scripts of one kind of transport, ``list`` or ``stream``, by name."""
    return load_scripts("holdfast.transports", "common", kind)


class RedisTransport(ABC):
    """Ids of ready jobs in keys of a Redis. Not connected until it is used."""

    kind: str
    """Which scripts it uses."""

    def __init__(self, server: Server, names: TransportKeys, consumer: str) -> None:
        self.names = names
        self.consumer = consumer
        self.pool = RedisPool(server, names.key, retry_for=RECONNECT_TIMEOUT, deadline=CALL_DEADLINE)
        self.place = self.pool.place
        self._scripts = scripts_of(self.kind)
        self._last_queues = {True: "", False: ""}  # the queue served last, of named queues and of others
        self._sweep = ""  # token of our lock
        self._readers: list[BlockingReader] = []  # idle connections to block on

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def run(self, name: str, *arguments: Argument) -> Any:
        """Returns the answer of a script."""
        return await self.pool.evaluate(self._scripts[name], self.names, self.consumer, *arguments)

    async def run_grouped(self, name: str, grouped: Mapping[str, Sequence[Argument]]) -> None:
        """Run a script that takes QUEUE, NUMBER and that many arguments, in parts."""
        for queue, arguments in grouped.items():
            for part in split_parts(arguments, _PART):
                await self.run(name, queue, len(part), *part)

    async def probe(self) -> None:
        await self.run("probe")

    async def close(self) -> None:
        while self._readers:
            self._readers.pop().wire.close()
        await self.pool.close()

    # ── ids come and go ───────────────────────────────────────────────────────────────────────────────────────
    async def publish(self, ready: Mapping[str, Sequence[str]]) -> None:
        await self.run_grouped("publish", ready)

    async def receive(self, capacity: Mapping[str, int], *, limit: int, paused: Collection[str]) -> list[Delivery]:
        slots = [word for queue, number in capacity.items() for word in (queue, number)]
        flat = await self.run(
            "receive", limit, self._last_queues[True], self._last_queues[False], len(paused), *paused, *slots
        )
        deliveries = deliveries_of(flat)
        for each in deliveries:
            self._last_queues[each.queue in capacity] = each.queue
        return deliveries

    async def nack(self, deliveries: Sequence[Delivery]) -> None:
        returned: dict[str, list[Argument]] = {}
        for each in deliveries:
            returned.setdefault(each.queue, []).extend((each.receipt, each.job_id))
        for queue, words in returned.items():  # whole: a part would go in front of the one before
            await self.run("nack", queue, len(words), *words)

    async def queue_backlogs(self, queues: Sequence[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in split_parts(queues, _PART):
            found |= zip(part, map(int, await self.run("backlog", *part)), strict=True)
        return found

    async def ids(self, queue: str, *, limit: int) -> set[str] | None:
        ids = await self.run("ids", queue, limit)
        return None if ids is None else set(map(text_of, ids))

    async def peek(self, queue: str, *, limit: int) -> tuple[list[str], int]:
        republished, *ids = await self.run("peek", queue, limit)
        return list(map(text_of, ids)), int(republished)

    async def republish(self, queue: str, overtaken: Overtaken) -> int:
        parts, times = split_parts(overtaken.ids, _PART), (overtaken.before_us, overtaken.now_us)
        return sum([int(await self.run("republish", queue, *times, *ids)) for ids in parts])

    async def dead_letter(self, dead: Mapping[str, Sequence[str]]) -> None:
        await self.run_grouped("add_dead_letters", dead)

    async def dead_letter_queues(self) -> list[str]:
        return [text_of(each) for each in await self.run("dead_letter_queues")]

    async def sync_dead_letters(self, queue: str, dead: Sequence[str]) -> None:
        await self.run("sync_dead_letters", queue, *dead)

    async def begin_sweep(self) -> bool:
        token = uuid4().hex
        acquired = await self.pool.run_command("SET", f"{self.names.key}@sweep", token, "NX", "PX", _LOCKED)
        self._sweep = token if acquired is not None else ""
        return bool(self._sweep)

    async def end_sweep(self) -> None:
        await self.run("end_sweep", self._sweep)

    async def maintain_queues(self, silence: int) -> list[Delivery]:
        """Maintains ``default`` and recently used queues; returns deliveries of consumers silent for ``silence`` ms."""
        found = deliveries_of(await self.run("maintain", silence, "default"))
        for start in itertools.count(0, _QUEUES_PER_CALL):
            queues = await self.run("known_queues", start, _QUEUES_PER_CALL)
            if not queues:
                break
            found += deliveries_of(await self.run("maintain", silence, *queues))
        return found

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────
    async def listen(
        self, queues: Sequence[str], *, paused: Collection[str], timeout: float, stop: asyncio.Event
    ) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            while (left := deadline - loop.time()) > 0 and not stop.is_set():
                watched = await self._watched(queues, paused)
                self._readers = [each for each in self._readers if each.wire.is_connected]
                reader = self._readers.pop() if self._readers else await self._open_reader()
                try:
                    found = await self._block(reader, watched, min(left, _BLOCK), stop)
                except BaseException:
                    reader.wire.close()
                    raise
                self._readers.append(reader)
                if found is not None:
                    return found
        except _TROUBLE as error:
            raise Unavailable(f"{self.place} cannot be reached: {' '.join(str(error).split())}") from error
        return []

    async def _watched(self, queues: Sequence[str], paused: Collection[str]) -> list[str]:
        """The queues to block on; "" stands for notifications of new queues."""
        named = [queue for queue in queues if queue != "*"]
        if "*" in queues:
            known = map(text_of, await self.run("known_queues", _MAX_WATCHED))
            named = list(dict.fromkeys(["", *named, *known, "default"]))
        return [queue for queue in named if queue not in paused]

    @abstractmethod
    async def _block(
        self, reader: BlockingReader, queues: Sequence[str], seconds: float, stop: asyncio.Event
    ) -> list[Delivery] | None:
        """Block until one of these has something, for some seconds or until ``stop``. None: look again."""

    def key_of(self, queue: str) -> str:
        """Returns the key of a queue's ready ids; for "" the key that receives names of new queues."""
        return self.names.ready(queue) if queue else f"{self.names.key}@new_queues"

    def queue_of(self, key: bytes) -> str:
        """Returns the queue of a key; "" for the key of new queues."""
        rest = text_of(key).removeprefix(self.names.key)
        return "" if rest == "@new_queues" else rest.removeprefix(":") or "default"

    async def _open_reader(self) -> BlockingReader:
        wire = await self.pool.connect(protocol=2)
        try:
            return BlockingReader(wire, self.pool, await run_within(CALL_DEADLINE, wire.send_command("CLIENT", "ID")))
        except BaseException:
            wire.close()
            raise


class BlockingReader:
    """A connection for blocking reads. Stopping one loses no message, unless the server cannot be reached then."""

    def __init__(self, wire: RedisConnection, pool: RedisPool, number: int) -> None:
        """``number``: by which another connection can unblock this one."""
        self.wire = wire
        self._pool = pool
        self._number = number

    async def read_blocking(self, *words: Argument, seconds: float, stop: asyncio.Event) -> Any:
        """Returns the answer to a command that blocks for ``seconds``; ``stop`` unblocks it, and its answer counts."""
        answering = self.wire.send_command(*words)
        stopping = asyncio.ensure_future(stop.wait())
        try:
            async with asyncio.timeout(seconds + _BLOCK_MARGIN) as deadline:
                await asyncio.wait([answering, stopping], return_when=asyncio.FIRST_COMPLETED)
                deadline.reschedule(asyncio.get_running_loop().time() + _BLOCK_MARGIN)
                while not answering.done():
                    await self._pool.run_command("CLIENT", "UNBLOCK", self._number)
                    await asyncio.wait([answering], timeout=_UNBLOCK_INTERVAL)
            return answering.result()
        finally:
            stopping.cancel()
            if not answering.cancel():
                answering.exception()  # retrieved, else asyncio logs it


def deliveries_of(flat: Sequence[bytes]) -> list[Delivery]:
    """QUEUE, RECEIPT, ID, repeated."""
    texts = [text_of(each) for each in flat]
    return [
        Delivery(job_id, queue, receipt)
        for queue, receipt, job_id in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]


def text_of(data: bytes) -> str:
    """Returns text from bytes of any origin."""
    return data.decode("utf-8", "replace")


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
        self, reader: BlockingReader, queues: Sequence[str], seconds: float, stop: asyncio.Event
    ) -> list[Delivery] | None:
        keys = [self.key_of(queue) for queue in queues]
        reply = await reader.read_blocking("BRPOP", *keys, f"{max(0.01, seconds):.3f}", seconds=seconds, stop=stop)
        if reply is None:
            return None
        key, job_id = reply
        queue = self.queue_of(key)
        return [Delivery(text_of(job_id), queue)] if queue else []


GROUP = "holdfast"
_PAUSE = 0.05  # seconds before a stream that has just gone is made again


class RedisStream(RedisTransport):
    """``silence``: after so long without a sign of life a consumer's deliveries are taken over."""

    kind = "stream"

    def __init__(self, server: Server, names: TransportKeys, consumer: str, *, silence: timedelta) -> None:
        super().__init__(server, names, consumer)
        self._silence = silence // timedelta(milliseconds=1)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        await self._run_on_receipts("ack", deliveries)

    async def set_aside(self, deliveries: Sequence[Delivery]) -> str:
        await self._run_on_receipts("set_aside", deliveries)
        return self.names.malformed

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        await self._run_on_receipts("extend", deliveries)

    async def _run_on_receipts(self, name: str, deliveries: Sequence[Delivery]) -> None:
        receipts: dict[str, list[Argument]] = {}
        for each in deliveries:
            if each.receipt:
                receipts.setdefault(each.queue, []).append(each.receipt)
        await self.run_grouped(name, receipts)

    async def reclaim(self) -> list[Delivery]:
        return await self.maintain_queues(self._silence)

    async def _block(
        self, reader: BlockingReader, queues: Sequence[str], seconds: float, stop: asyncio.Event
    ) -> list[Delivery] | None:
        keys = [self.key_of(queue) for queue in queues]
        words = ("GROUP", GROUP, self.consumer, "COUNT", 1, "BLOCK", max(1, int(seconds * 1000)), "STREAMS")
        try:
            reply = await reader.read_blocking(
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
        new_queue_receipts = [each.receipt for each in found if not each.queue]
        if new_queue_receipts:
            await self.pool.run_command("XACK", self.key_of(""), GROUP, *new_queue_receipts)
            await self.pool.run_command("XDEL", self.key_of(""), *new_queue_receipts)
        return [each for each in found if each.queue] if found else None


def _id(fields: Sequence[bytes]) -> str:
    """Field ``id`` of an entry; of another program's entry all its fields."""
    return text_of(dict(zip(fields[::2], fields[1::2], strict=False)).get(b"id", b" ".join(fields)))
