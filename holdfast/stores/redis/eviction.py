"""Watch on the server's eviction policy, which may change while the store is open."""

from __future__ import annotations

import logging
import time

from holdfast.core.errors import Unavailable
from holdfast.stores.redis.maintenance import may_evict, parse_info
from holdfast.stores.redis.pool import NamespacePool

LOOK_EVERY = 5.0  # seconds


class EvictionWatch:
    """The eviction policy as of the last look. Event loops of one store share it: a change is logged once."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._policy = ""  # "" unless it evicts

    async def refuse_evicting(self, links: NamespacePool) -> None:
        """Raises Unavailable while the server evicts: it might drop the job that it acknowledges."""
        await self.read_policy(links)
        if self._policy:
            raise Unavailable(f"{_description(links, self._policy)}; config set maxmemory-policy noeviction")

    async def read_policy(self, links: NamespacePool) -> None:
        """Reads the policy unless that was done within ``LOOK_EVERY``; logs a change."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_EVERY
        info = parse_info(await links.run_command("INFO", "memory"))
        policy = info.get("maxmemory_policy", "")
        before, self._policy = self._policy, policy if may_evict(policy) else ""
        log = logging.getLogger(__name__)
        if self._policy and not before:
            text = "%s; submissions are refused: config set maxmemory-policy noeviction"
            log.error(text, _description(links, self._policy))
        elif before and not self._policy:
            log.warning("%s evicts no keys any more; submissions are accepted", links.place)


def _description(links: NamespacePool, policy: str) -> str:
    return f"{links.place} evicts keys when it is full (maxmemory-policy={policy}) and would drop jobs"
