"""The application that crash tests run: made from the environment, its handlers write into the ledger."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from holdfast import Context, Dead, Holdfast
from tests.crash.ledger import append

LEDGER = Path(os.environ["CRASH_LEDGER"])
STEP = 0.02
"""Seconds. Work is counted in steps, not by a clock: a process that is frozen has as much left as before."""

app = Holdfast()


def note(what: str, ctx: Context, **more: Any) -> None:
    """A line about this execution."""
    append(LEDGER, what=what, job=ctx.id, claims=ctx.claims, attempt=ctx.attempts, **more)


@app.task("crash.work")
async def work(ctx: Context, seconds: float, by: str = "", index: int = 0) -> dict[str, int]:
    """Work that can be cancelled; the result says whose it is. Who submitted it says so."""
    note("start", ctx)
    try:
        for _ in range(round(seconds / STEP)):
            await asyncio.sleep(STEP)
    except asyncio.CancelledError:
        note("cancelled", ctx)
        raise
    note("end", ctx)
    return {"claims": ctx.claims}


@app.task("crash.steps")
async def take_steps(ctx: Context, steps: int, seconds: float) -> dict[str, int]:
    """A workflow; each run of a step leaves a line."""
    note("start", ctx)

    async def do(number: int) -> int:
        note("step", ctx, number=number)
        for _ in range(round(seconds / STEP)):
            await asyncio.sleep(STEP)
        return number

    try:
        done = [await ctx.step(f"step-{number}", do, number) for number in range(steps)]
    except BaseException:
        note("cancelled", ctx)
        raise
    note("end", ctx)
    return {"claims": ctx.claims, "steps": len(done)}


@app.task("crash.wait")
async def wait(ctx: Context, topics: list[str], seconds: float) -> dict[str, int]:
    """Waits for a signal of each topic, one after the other."""
    note("start", ctx)
    values: list[int | None] = []
    try:
        for topic in topics:
            try:
                values.append(await ctx.wait_for(topic, timeout=seconds))
            except TimeoutError:
                values.append(None)
    except BaseException:
        note("cancelled", ctx)
        raise
    note("got", ctx, values=values)
    note("end", ctx)
    return {"claims": ctx.claims}


@app.task("crash.member")
async def member(ctx: Context, seconds: float = 0.0, fails: bool = False) -> dict[str, int]:
    """Takes so long. One that ``fails`` is dead under its first claim."""
    note("start", ctx)
    await asyncio.sleep(seconds)
    note("end", ctx)
    if fails and ctx.claims == 1:
        raise Dead("a member that fails")
    return {"claims": ctx.claims}


@app.task("crash.parent")
async def parent(ctx: Context, children: int, seconds: float) -> dict[str, int]:
    """Waits for children: many together, then one."""
    note("start", ctx)
    try:
        done = await ctx.gather(*[ctx.call(member, seconds) for _ in range(children - 1)])
        done.append(await ctx.call(member, seconds))
    except BaseException:
        note("cancelled", ctx)
        raise
    note("end", ctx)
    return {"claims": ctx.claims, "children": len(done)}


@app.task("crash.poison")
async def poison(ctx: Context) -> None:
    """Kills the process it runs in."""
    note("start", ctx)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task("crash.spin")
async def spin(ctx: Context, seconds: float) -> dict[str, int]:
    """Blocks the event loop."""
    note("start", ctx)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    note("end", ctx)
    return {"claims": ctx.claims}
