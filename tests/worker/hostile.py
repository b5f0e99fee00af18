"""Handlers whose exceptions would hurt their readers, for every executor. Children import this module."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast import Holdfast, RetryAfter, Snooze


class Mute(Exception):
    """Every look at one of its attributes raises."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise RuntimeError(f"no {name} here")


class Closing(Exception):
    """Every look at one of its attributes raises what ends a coroutine."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise GeneratorExit


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class Text(str):
    def __getitem__(self, _: Any) -> NoReturn:
        raise SystemExit(5)

    __format__ = __getitem__


class Worded(Exception):
    def __str__(self) -> str:
        return Text("worded")


class Masked(Exception):
    @property
    def __class__(self) -> NoReturn:  # type: ignore[override]  # raising is the point
        raise SystemExit(6)


class Endless(Exception):
    """Its cause is another one, made when it is asked for."""

    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]  # read-only is the point
        return Endless()


class Deeper(Exception):
    @property
    def __context__(self) -> BaseException:  # type: ignore[override]  # read-only is the point
        raise SystemExit(7)


class Nameless(type):
    @property
    def __name__(cls) -> NoReturn:  # type: ignore[override]  # raising is the point
        raise SystemExit(8)


class Anonymous(Exception, metaclass=Nameless):
    pass


class Basic(BaseException):
    pass


class Crowded(ExceptionGroup):
    @property
    def exceptions(self) -> tuple[Exception, ...]:
        return (Crowded("one more", [ValueError()]),)


def _circle() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def _chain() -> BaseException:
    error = first = ValueError("link")
    for _ in range(20_000):
        error.__cause__ = ValueError("link")
        error = error.__cause__
    return first


def _delayed(error: Any, delay: Any) -> BaseException:
    error.delay = delay
    return error  # type: ignore[no-any-return]  # made to measure


ERRORS: dict[str, Callable[[], BaseException]] = {
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": lambda: StopIteration(5),
    "StopAsyncIteration": StopAsyncIteration,
    "Basic": Basic,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("g", [GeneratorExit(), SystemExit(1), KeyboardInterrupt()]),
    "Crowded": lambda: Crowded("many", [ValueError()]),
    "Mute": Mute,
    "Closing": Closing,
    "Unspeakable": Unspeakable,
    "Worded": Worded,
    "Masked": Masked,
    "Endless": Endless,
    "Deeper": Deeper,
    "Anonymous": Anonymous,
    "ValueError: first": _circle,
    "ValueError: link": _chain,
    "Snooze": lambda: _delayed(Snooze(1), "soon"),
    "RetryAfter": lambda: _delayed(RetryAfter(1), -5.0),
}
"""What a handler raises, by the beginning of the error that is stored."""

app = Holdfast()


def _broken(_: BaseException) -> bool:
    raise SystemExit(9)


@app.task("coroutine", max_attempts=1)
async def coroutine(case: str) -> None:
    await asyncio.sleep(0)
    raise ERRORS[case]()


@app.task("thread", max_attempts=1)
def thread(case: str) -> None:
    raise ERRORS[case]()


@app.task("process", max_attempts=1, executor="process")
def process(case: str) -> None:
    raise ERRORS[case]()


@app.task("process.async", max_attempts=1, executor="process")
async def process_async(case: str) -> None:
    await asyncio.sleep(0)
    raise ERRORS[case]()


@app.task("judged", max_attempts=1, dead_on=_broken, retry_on=OSError)
async def judged(case: str) -> None:
    raise ERRORS[case]()


async def _leave(code: int) -> None:
    await asyncio.sleep(0.01)
    sys.exit(code)


@app.task("group", max_attempts=1)
async def group() -> None:
    """One of its tasks exits: asyncio hands that to the event loop as well."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_leave(11))
        tasks.create_task(asyncio.sleep(60))


@app.task("gather", max_attempts=1)
async def gather() -> None:
    await asyncio.gather(_leave(12), asyncio.sleep(0))


@app.task("gather.process", max_attempts=1, executor="process")
async def gather_process() -> None:
    await asyncio.gather(_leave(12), asyncio.sleep(0))


@app.task("callback")
async def callback() -> str:
    asyncio.get_running_loop().call_soon(sys.exit, 13)
    await asyncio.sleep(0.05)
    return "went on"


@app.task("closes.itself", max_attempts=1)
async def closes_itself() -> None:
    """Closes the coroutine that runs it, as soon as that waits."""
    current = asyncio.current_task()
    assert current is not None
    asyncio.get_running_loop().call_soon(current.get_coro().close)
    await asyncio.sleep(0.05)


@app.task("refuses.to.end", max_attempts=1)
async def refuses_to_end() -> None:
    current = asyncio.current_task()
    assert current is not None
    asyncio.get_running_loop().call_soon(current.get_coro().close)
    try:
        await asyncio.sleep(0.05)
    except GeneratorExit:
        await asyncio.sleep(0.05)


@dataclass
class Picky:
    number: int

    def __post_init__(self) -> None:
        sys.exit(14)


@app.task("picky", max_attempts=1)
async def picky(picky: Picky) -> None: ...


@dataclass
class Shown:
    text: str = "shown"

    def __getattribute__(self, name: str) -> Any:
        raise GeneratorExit


@app.task("result", max_attempts=1)
async def result() -> Any:
    return Shown()


@app.task("good")
async def good() -> str:
    return "good"
