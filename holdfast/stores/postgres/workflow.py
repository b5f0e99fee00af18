"""Family ``workflow`` of PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.steps import NewStep, Step
from holdfast.stores.common.requests import extra_timeout
from holdfast.stores.postgres.encoding import NumberedStatement, from_text, is_id, text_or_none, to_text
from holdfast.stores.postgres.pool import PostgresPool


class PostgresWorkflow:
    """Family ``workflow`` of PostgreSQL."""

    def __init__(self, pool: PostgresPool, statements: Mapping[str, NumberedStatement]) -> None:
        self._pool = pool
        self._sql = statements

    async def save_steps(self, steps: Sequence[NewStep]) -> list[bool]:
        places = [n for n, step in enumerate(steps) if is_id(step.lease.job_id)]
        known = [steps[n] for n in places]
        rows = await self._pool.fetch(
            self._sql["save_steps"],
            extra=extra_timeout(len(known), sum(len(step.result or "") for step in known)),
            ids=[step.lease.job_id for step in known],
            claims=[step.lease.claims for step in known],
            workers=[step.worker for step in known],
            numbers=[step.number for step in known],
            in_orders=[step.in_order for step in known],
            names=[to_text(step.name) for step in known],
            results=[text_or_none(step.result) for step in known],
        )
        kept = {places[ordinal - 1] for (ordinal,) in rows}
        return [n in kept for n in range(len(steps))]

    async def read_steps(self, job_id: str) -> list[Step]:
        rows = await self._pool.fetch(self._sql["steps"], id=job_id) if is_id(job_id) else []
        return [
            Step(from_text(name), number, in_order, claims, ended_at, None if result is None else from_text(result))
            for name, number, in_order, claims, ended_at, result in rows
        ]
