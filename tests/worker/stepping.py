"""Helpers for tests of steps."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast import Holdfast
from holdfast.core.models import Step


class Ledger:
    """Records the calls of step functions."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def do(self, what: str) -> str:
        self.done.append(what)
        return what.upper()

    def do_now(self, what: str) -> str:
        self.done.append(what)
        return what.upper()


async def steps_of(app: Holdfast, job_id: str) -> list[Step]:
    return await (await app.open_store()).workflow.read_steps(job_id)


@dataclass
class Receipt:
    number: int
    lines: tuple[str, ...]
