"""What a transport promises: Redis LIST and Stream implement it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from holdfast.core.models import Delivery, Overtaken


class Transport(Protocol):
    """Carries the ids of ready jobs from who made them ready to a worker: a hint. It may lose, repeat or delay, and
    nothing breaks: the store is the truth. Belongs to one event loop. Raises the errors of ``holdfast.core.errors``."""

    place: str
    """The server in words."""

    async def probe(self) -> None:
        """Raise unless everything can be read and written."""

    async def close(self) -> None:
        """Let go."""

    async def publish(self, ready: Mapping[str, Sequence[str]]) -> None:
        """These jobs are ready, by queue and in this order."""

    async def receive(self, wants: Mapping[str, int], *, limit: int, closed: Collection[str]) -> list[Delivery]:
        """What waits, in the order of its arrival: of each queue at most what it wants, of ``closed`` ones nothing."""

    async def listen(
        self, queues: Sequence[str], *, closed: Collection[str], timeout: float, stop: asyncio.Event
    ) -> list[Delivery]:
        """Wait until something arrives for one of the queues, for ``timeout`` seconds or until ``stop`` is set, and
        take it. Not to be cancelled: that might lose what it takes."""

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """What these stood for is settled, or was none of ours."""

    async def set_aside(self, deliveries: Sequence[Delivery]) -> str:
        """Removes messages that hold no job id. Returns where they are kept for inspection; "" for nowhere."""

    async def nack(self, deliveries: Sequence[Delivery]) -> None:
        """These are for somebody else, the first of them first."""

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Somebody still works on what these stand for."""

    async def queue_backlogs(self, queues: Sequence[str]) -> dict[str, int]:
        """How many ids wait for each queue."""

    async def ids(self, queue: str, *, most: int) -> set[str] | None:
        """All ids that wait for the queue; None where they are more than ``most``."""

    async def peek(self, queue: str, *, most: int) -> tuple[list[str], int]:
        """Those ids of the queue that come next, and how many ``republish`` has announced that may still wait."""

    async def republish(self, queue: str, passed: Overtaken) -> int:
        """Announce what others have passed by, but for what may still wait since the last time; how many that were."""

    async def dead_letter(self, dead: Mapping[str, Sequence[str]]) -> None:
        """These jobs, by queue, are dead letters."""

    async def dead_letter_queues(self) -> list[str]:
        """The queues that have a list of dead letters."""

    async def sync_dead_letters(self, queue: str, dead: Sequence[str]) -> None:
        """Make a queue's list of dead letters hold exactly these."""

    async def reclaim(self) -> list[Delivery]:
        """What was delivered to who has died since is ours now. Clears away what nobody needs."""

    async def begin_sweep(self) -> bool:
        """Whether nobody else sweeps now; then nobody will until ``end_sweep``, or for some seconds."""

    async def end_sweep(self) -> None:
        """Others may sweep again."""
