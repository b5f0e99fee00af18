"""Family ``maintenance`` of Redis."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from holdfast.core.models import Job, JobState
from holdfast.stores.common.requests import FORGOTTEN_AFTER
from holdfast.stores.connections.redis import Script
from holdfast.stores.redis.encoding import Kinds, shown_jobs, span_us
from holdfast.stores.redis.notifications import RedisNotifications
from holdfast.stores.redis.pool import NamespacePool
from holdfast.stores.redis.queueing import PIECE
from holdfast.stores.redis.server_info import EvictionWatch


class RedisMaintenance:
    """Family ``maintenance`` of Redis."""

    def __init__(
        self,
        links: NamespacePool,
        news: RedisNotifications,
        scripts: Mapping[str, Script],
        kinds: Kinds,
        eviction: EvictionWatch,
    ) -> None:
        self._links = links
        self._news = news
        self._scripts = scripts
        self._kinds = kinds
        self._eviction = eviction

    async def promote_due(self, *, limit: int) -> int:
        promoted = 0
        while promoted < limit:
            piece = min(PIECE, limit - promoted)
            number = int(await self._links.run(self._scripts["promote"], piece))
            promoted += number
            if number < piece:
                break
        self._news.notify_done({"queue:*"} if promoted else ())
        return promoted

    async def find_expired(self, *, limit: int) -> list[Job]:
        """Running jobs whose lease ran out. Workers that submit nothing notice here that the server evicts."""
        await self._eviction.read_policy(self._links)
        found: list[Job] = []
        while len(found) < limit:
            piece = min(PIECE, limit - len(found))
            jobs, looked = await self._links.run(self._scripts["expired"], len(found), piece)
            found += [job for _, job in shown_jobs(jobs, self._kinds)]
            if looked < piece:
                break
        return found

    async def prune(self, ended_for: Mapping[str, timedelta], *, limit: int) -> int:
        """Delete what ended long enough ago, up to ``limit`` jobs in all."""
        pruned = 0
        ended = {JobState.SUCCEEDED.value, JobState.DEAD.value, JobState.CANCELLED.value}
        for state, span in ended_for.items():
            while state in ended and pruned < limit:
                piece = min(PIECE, limit - pruned)
                number, looked = await self._links.run(self._scripts["prune"], state, span_us(span), piece)
                pruned += number
                if not looked:
                    break
        await self._links.run(self._scripts["prune_rest"], min(limit, PIECE), span_us(FORGOTTEN_AFTER))
        return pruned

    async def reannounce(self) -> int:
        return 0
