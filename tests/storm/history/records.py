"""Histories: the calls that processes made to a store, and its answers, in append-only files.

A call writes two lines: its request before it is sent, and the outcome. A call without a second line, or whose second
line says ``unknown``, may or may not have had its effect.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.core.errors import Conflict, Invalid, Unavailable

T = TypeVar("T")
Items = list[dict[str, Any]]

FAR = 1 << 62
CALL_SECONDS = 8.0
"""After which a process gives a call up, and does not know its outcome."""

_true_ns = time.time_ns  # an actor turns its own clock; servers run on this host and do not see that


class Event(msgspec.Struct, kw_only=True):
    """A call, as far as it concerns one job.

    asked, answered: nanoseconds of the host's monotonic clock, ``FAR`` without an answer. since_us, until_us: the
    store's clock at these instants. own_us: the process's own clock at the request. given: the request. got: the
    answer; None if the outcome is unknown.
    """

    verb: str
    process: str
    job: str
    asked: int
    since_us: int
    own_us: int = 0
    given: dict[str, Any] = {}
    answered: int = FAR
    until_us: int = FAR
    got: dict[str, Any] | None = None

    @property
    def is_accepted(self) -> bool:
        """Returns True if the store said that it had the effect."""
        return self.got is not None and bool(self.got.get("accepted"))

    @property
    def may_have_effect(self) -> bool:
        """Returns True if it was accepted, or its outcome is unknown."""
        return self.got is None or bool(self.got.get("accepted") or self.got.get("open"))


class Recorder:
    """Writes the calls of one process. ``turned_us``: how far the store's clock was turned on; 0 for a server."""

    def __init__(self, file: Path, turned_us: Callable[[], int] = lambda: 0) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._turned_us = turned_us
        self._numbers = itertools.count()

    def store_clock_us(self) -> int:
        """Returns the store's clock: that of the host, and what a SQLite file's processes add."""
        return _true_ns() // 1000 + self._turned_us()

    def _write(self, **line: Any) -> None:
        line |= {"us": self.store_clock_us(), "at": time.monotonic_ns()}
        os.write(self._descriptor, msgspec.json.encode(line) + b"\n")

    async def call(
        self, verb: str, given: Items, call: Coroutine[Any, Any, T], describe: Callable[[T], Items]
    ) -> T | None:
        """Makes a call and records it. ``given``: an item for each job of the request, empty if it names none.

        ``describe`` turns the answer into such items. Returns None without an answer.
        """
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self.observe(verb, given, call, describe)
        except (Invalid, Conflict, Unavailable, TimeoutError):
            return None

    async def observe(self, verb: str, given: Items, call: Coroutine[Any, Any, T], describe: Callable[[T], Items]) -> T:
        """Records a call like ``call``, and raises what it raises."""
        number = next(self._numbers)
        own_us = time.time_ns() // 1000
        self._write(n=number, verb=verb, given=given, own=own_us)
        try:
            answer = await call
        except (Invalid, Conflict) as error:
            self._write(n=number, refused=str(error))
            raise
        except BaseException as error:
            self._write(n=number, unknown=f"{type(error).__name__}: {error}")
            raise
        self._write(n=number, got=describe(answer))
        return answer


def read_histories(folder: Path) -> list[Event]:
    """Returns the events of every file, in the order of their requests."""
    events = [event for file in sorted(folder.glob("*.jsonl")) for event in _read_file(file)]
    return sorted(events, key=lambda event: event.asked)


def _read_file(file: Path) -> Iterable[Event]:
    requests: dict[int, dict[str, Any]] = {}
    outcomes: dict[int, dict[str, Any]] = {}
    for line in file.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):  # the process was killed while it wrote
            continue
        entry = msgspec.json.decode(line)
        (requests if "verb" in entry else outcomes)[entry["n"]] = entry
    for number, request in requests.items():
        yield from _events_of(file.stem, request, outcomes.get(number, {}))


def _events_of(process: str, request: dict[str, Any], outcome: dict[str, Any]) -> Iterable[Event]:
    known = {"process": process, "verb": request["verb"], "asked": request["at"], "since_us": request["us"]}
    known |= {"own_us": request["own"]}
    if "refused" in outcome or "got" in outcome:
        known |= {"answered": outcome["at"], "until_us": outcome["us"]}
    given: Items = request["given"]
    if "refused" in outcome:
        got: Sequence[dict[str, Any] | None] = [{"accepted": False, "refused": outcome["refused"]}] * len(given)
    else:
        got = outcome.get("got", [None] * max(1, len(given)))
    for asked, answer in itertools.zip_longest(given, got, fillvalue=None):
        job = (asked or answer or {}).get("job", "")
        yield Event(**known, job=job, given=asked or {}, got=answer)


def group_by_job(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Returns the events of each job in their order; those that name no job under the empty text."""
    grouped: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        grouped[event.job].append(event)
    return grouped


def describe_history(events: Sequence[Event]) -> str:
    """Returns the events as text, one line each, with seconds since the first."""
    first, first_us = events[0].asked, events[0].since_us
    return "\n".join(_line(event, first, first_us) for event in events)


def _line(event: Event, first: int, first_us: int) -> str:
    def seconds(instant: int, since: int, unit: float) -> str:
        return f"{(instant - since) / unit:9.4f}"

    span = f"{seconds(event.asked, first, 1e9)} to {seconds(event.answered, first, 1e9) if event.got else '  unknown'}"
    own = f"{(event.own_us - event.since_us) / 1e6:+.0f}s"
    given = _fields(event.given, first_us)
    got = "outcome unknown" if event.got is None else _fields(event.got, first_us)
    return f"  {span}  {event.process:<12} (own clock {own}) {event.verb}({given}) → {got}"


def _fields(values: dict[str, Any], first_us: int) -> str:
    """Instants of the store count in seconds from the first event, as the others do."""
    named = {name: value for name, value in values.items() if name == "state" or (name != "job" and value is not None)}
    shown = {
        name.removesuffix("_us"): f"{(value - first_us) / 1e6:.4f}" if name.endswith("_us") else value
        for name, value in named.items()
    }
    return ", ".join(f"{name}={value}" for name, value in shown.items())
