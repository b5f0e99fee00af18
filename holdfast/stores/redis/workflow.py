"""Family ``workflow`` of Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.steps import NewStep, Step
from holdfast.stores.connections.redis import Script, in_batches
from holdfast.stores.redis.claiming import MAX_BATCH
from holdfast.stores.redis.encoding import decode_text, fields_of
from holdfast.stores.redis.pool import NamespacePool


class RedisWorkflow:
    """Family ``workflow`` of Redis."""

    def __init__(self, pool: NamespacePool, scripts: Mapping[str, Script]) -> None:
        self._pool = pool
        self._scripts = scripts

    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        """Up to ``MAX_BATCH`` steps are one transaction."""
        kept: list[bool] = []
        for batch in in_batches(steps, MAX_BATCH):
            arguments = [
                argument
                for step in batch
                for argument in (
                    step.lease.job_id,
                    step.lease.claims,
                    step.worker or "",
                    step.name,
                    step.number,
                    int(step.in_order),
                    "" if step.result is None else "=" + step.result,
                )
            ]
            kept += map(bool, await self._pool.run(self._scripts["save_steps"], *arguments, synced=True))
        return kept

    async def read_steps(self, job_id: str) -> list[Step]:
        stored = fields_of(await self._pool.run_command("HGETALL", f"{self._pool.address.prefix}steps:{job_id}"))
        return sorted((_step(name, text) for name, text in stored.items()), key=lambda step: (step.number, step.name))


def _step(name: bytes, text: bytes) -> Step:
    head, _, result = text.partition(b"\n")
    number, in_order, claims, ended_at_us = map(int, head.split(b" "))
    return Step(
        decode_text(name), number, bool(in_order), claims, ended_at_us, decode_text(result[1:]) if result else None
    )
