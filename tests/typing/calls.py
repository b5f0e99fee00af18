"""A sample application that test_typing.py shows to mypy and pyright, both strict. Never run.

``# shows: T`` ends a line whose ``reveal_type`` must answer T; ``# wrong: code`` a line that must be refused with that
code; every other line must be accepted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, reveal_type

from fastapi import Depends, FastAPI

from holdfast import CallNext, Context, Holdfast, JobHandle
from holdfast.core.models import NewJob
from holdfast.integrations.fastapi import HoldfastDep, holdfast_lifespan, require_scope
from holdfast.web.routing import RequestContext

app = Holdfast("sqlite:///never.db")


@app.task("email.send")
async def send(ctx: Context, to: str, subject: str = "hi") -> str:
    return f"{ctx.id} {to} {subject}"


@app.task("plain")
async def plain(count: int) -> float:
    return count / 2


@app.task("resize")
def resize(ctx: Context, width: int, *, height: int) -> list[int]:
    return [ctx.attempts, width, height]


@app.task()
def nothing() -> None: ...


async def awaited() -> None:
    reveal_type(await send.enqueue("a@b.c", subject="hi"))  # shows: JobHandle[str]
    reveal_type(await plain.enqueue(1))  # shows: JobHandle[float]
    reveal_type(await resize.enqueue(1, height=2))  # shows: JobHandle[list[int]]
    reveal_type(await nothing.enqueue())  # shows: JobHandle[None]
    reveal_type(await (await send.enqueue("a")).result(timeout=30))  # shows: str
    reveal_type(await (await resize.enqueue(1, height=2)).result())  # shows: list[int]
    reveal_type(await send.options(delay=60, priority=5, key="k").enqueue("a"))  # shows: JobHandle[str]
    reveal_type(await resize.options(queue="slow").enqueue(1, height=2))  # shows: JobHandle[list[int]]
    async with app.worker(queues={"mail": 10}, concurrency=5, grace="5s") as worker:
        reveal_type(worker)  # shows: InProcessWorker
        reveal_type(worker.id)  # shows: str
    await app.run_worker(queues="mail:10", drain=True)
    await app.run_worker(drain="yes")  # wrong: arg-type
    await app.run_worker(queues=5)  # wrong: arg-type
    await send.enqueue()  # wrong: call-arg
    await send.enqueue(1)  # wrong: arg-type
    await send.enqueue("a", subjekt="x")  # wrong: call-arg
    await plain.enqueue("1")  # wrong: arg-type
    await resize.enqueue(1, 2)  # wrong: call-arg
    await nothing.enqueue(1)  # wrong: call-arg
    await send.options(delay=60).enqueue(1)  # wrong: arg-type
    await resize.options(delay=60).enqueue(1)  # wrong: call-arg
    send.options(prioritty=5)  # wrong: call-arg
    send.options(priority="high")  # wrong: arg-type


def blocking() -> None:
    reveal_type(send.sync.enqueue("a@b.c"))  # shows: JobHandle[str]
    reveal_type(resize.sync.enqueue(1, height=2))  # shows: JobHandle[list[int]]
    reveal_type(plain.options(delay=1).sync.enqueue(1))  # shows: JobHandle[float]
    reveal_type(resize.new_job(1, height=2))  # shows: NewJob
    reveal_type(send.options(priority=1).new_job("a"))  # shows: NewJob
    send.sync.enqueue(1)  # wrong: arg-type
    resize.sync.enqueue(1)  # wrong: call-arg
    plain.options(delay=1).sync.enqueue("1")  # wrong: arg-type
    plain.new_job("1")  # wrong: arg-type
    reveal_type(plain.sync.enqueue(1).sync.result())  # shows: float
    reveal_type(plain.sync.enqueue(1).sync.result(timeout=30))  # shows: float
    reveal_type(plain.sync.enqueue(1).sync.state())  # shows: JobState
    reveal_type(app.sync.get("id"))  # shows: Job
    reveal_type(app.sync.count())  # shows: int
    reveal_type(app.sync.enqueue("plain", {"count": 1}, delay=60))  # shows: JobHandle[Any]
    reveal_type(app.sync.workers())  # shows: list[WorkerInfo]
    app.sync.nope()  # wrong: attr-defined
    app.sync.get(1)  # wrong: arg-type
    app.sync.find(limit="5")  # wrong: arg-type
    plain.sync.enqueue(1).sync.nope()  # wrong: attr-defined


async def called_directly(context: Context) -> None:
    reveal_type(await send(context, "a", subject="hi"))  # shows: str
    reveal_type(await plain(1))  # shows: float
    reveal_type(resize(context, 1, height=2))  # shows: list[int]
    await plain("1")  # wrong: arg-type
    resize(1, height=2)  # wrong: arg-type, call-arg


async def makes_steps(context: Context) -> None:
    reveal_type(await context.step("halve", halve, 1))  # shows: float
    reveal_type(await context.step("count", len, "abc"))  # shows: int
    reveal_type(await context.with_options(tries=3).step("halve", halve, count=1))  # shows: float
    reveal_type(context.sync.step("count", len, "abc"))  # shows: int
    await context.step("halve", halve, "1")  # wrong: call-overload
    reveal_type(await context.step_in(None, "halve", halve, 1))  # shows: float
    reveal_type(await context.step_in(None, "count", len, "abc"))  # shows: int
    reveal_type(context.sync.step_in(None, "count", len, "abc"))  # shows: int
    reveal_type(await context.complete(None, "paid"))  # shows: str
    reveal_type(context.sync.complete(None, 1))  # shows: int
    await context.complete(None)


async def halve(count: int) -> float:
    return count / 2


@app.middleware
async def timed(job: Context, call_next: CallNext) -> object:
    return await call_next(job)


@app.middleware  # wrong: type-var
async def backwards(call_next: CallNext, job: Context) -> object:
    return await call_next(job)


def handles(kept: list[JobHandle[str]], jobs: list[NewJob]) -> None:
    kept.append(send.sync.enqueue("a"))
    kept.append(plain.sync.enqueue(1))  # wrong: arg-type
    jobs.append(plain.new_job(1))


@asynccontextmanager
async def own_lifespan(site: FastAPI) -> AsyncGenerator[None, None]:
    yield


def site_with_both_lifespans() -> FastAPI:
    FastAPI(lifespan=holdfast_lifespan(send))  # wrong: arg-type
    return FastAPI(lifespan=holdfast_lifespan(app, own_lifespan))


async def injected(given: HoldfastDep, call: Annotated[RequestContext, Depends(require_scope("read"))]) -> None:
    reveal_type(given)  # shows: Holdfast
    reveal_type(call.app)  # shows: Holdfast
