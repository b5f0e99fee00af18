"""Contract of a transport: Redis LIST and Stream implement it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from holdfast.core.models import Overtaken


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """An id as a transport delivered it."""

    job_id: str  # untrusted text
    queue: str  # the queue it was delivered for
    receipt: str = ""  # the transport's handle of this delivery; "" if it needs none


class Transport(Protocol):
    """Carries the ids of ready jobs from their producers to a worker: a hint. It may lose, repeat or delay, and
    nothing breaks: the store is the truth. Belongs to one event loop. Raises the errors of ``holdfast.core.errors``."""

    place: str
    """The server in words."""

    async def probe(self) -> None:
        """Raise unless everything can be read and written."""

    async def close(self) -> None:
        """Let go."""

    async def publish(self, ready: Mapping[str, Sequence[str]]) -> None:
        """Publishes ready jobs, by queue and in this order."""

    async def receive(self, capacity: Mapping[str, int], *, limit: int, paused: Collection[str]) -> list[Delivery]:
        """Returns deliveries in the order of arrival: up to the wanted number of each queue, none of ``paused``."""

    async def listen(
        self, queues: Sequence[str], *, paused: Collection[str], timeout: float, stop: asyncio.Event
    ) -> list[Delivery]:
        """Wait until something arrives for one of the queues, for ``timeout`` seconds or until ``stop`` is set, and
        take it. Do not cancel it: that may lose a delivery."""

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledges deliveries that are settled, or not ours."""

    async def set_aside(self, deliveries: Sequence[Delivery]) -> str:
        """Removes messages that hold no job id. Returns where they are kept for inspection; "" for nowhere."""

    async def nack(self, deliveries: Sequence[Delivery]) -> None:
        """Gives deliveries back for other consumers, the first of them first."""

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Extends deliveries whose jobs are still in work."""

    async def queue_backlogs(self, queues: Sequence[str]) -> dict[str, int]:
        """Returns the number of ids in each queue."""

    async def ids(self, queue: str, *, limit: int) -> set[str] | None:
        """All ids that wait for the queue; None where they are more than ``limit``."""

    async def peek(self, queue: str, *, limit: int) -> tuple[list[str], int]:
        """Returns the next ids of the queue, and the number of ids from ``republish`` that may still wait."""

    async def republish(self, queue: str, overtaken: Overtaken) -> int:
        """Announce overtaken jobs, but for ids that may still wait since the last time; how many that were."""

    async def dead_letter(self, dead: Mapping[str, Sequence[str]]) -> None:
        """Adds dead letters, by queue."""

    async def dead_letter_queues(self) -> list[str]:
        """The queues that have a list of dead letters."""

    async def sync_dead_letters(self, queue: str, dead: Sequence[str]) -> None:
        """Make a queue's list of dead letters hold exactly these."""

    async def reclaim(self) -> list[Delivery]:
        """Takes over the deliveries of dead consumers. Removes consumers without deliveries."""

    async def begin_sweep(self) -> bool:
        """Returns True if no other process sweeps now; then none will until ``end_sweep``, or for some seconds."""

    async def end_sweep(self) -> None:
        """Ends a sweep, for the next one."""


class TransportKeys(NamedTuple):
    """Of the queue ``default``; another queue's name is appended after a colon."""

    key: str
    dead_key: str

    def ready(self, queue: str) -> str:
        """The key of a queue's ready ids."""
        return _of(self.key, queue)

    @property
    def malformed(self) -> str:
        """The key of the stream of messages that held no job id."""
        return f"{self.key}@malformed"

    def dead_letter_key(self, queue: str) -> str:
        """The key of a queue's dead letters."""
        return _of(self.dead_key, queue)


def _of(key: str, queue: str) -> str:
    return key if queue == "default" else f"{key}:{queue}"
