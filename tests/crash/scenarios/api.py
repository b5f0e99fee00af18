"""The API under clients that submit with keys and try again: it is killed, and its store goes away and comes back."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import httpx

from holdfast.web.asgi import OPERATIONS
from tests.crash.database import Database, database_of
from tests.crash.fleet import until
from tests.crash.report import Report
from tests.support.load import percentile
from tests.support.plain_http import PLAIN
from tests.support.postgres import Postgres
from tests.support.redis import Redis
from tests.support.stores import Home
from tests.web import garbage as bad
from tests.web.client import Api
from tests.web.described import complaints
from tests.web.serving import Served

PATIENCE = 90
"""Seconds to wait for what is to happen at once: past that it will never be."""
OPEN = (0.05, 0.4)
"""Seconds from its first answer until the API is killed."""


class Answer(NamedTuple):
    """What one request came to."""

    key: str
    status: int  # 0: the connection broke
    job: str
    at: float
    seconds: float


class Clients:
    """So many clients, each of which submits a job under one key after the other. Use it with ``with``.

    ``stubborn``: a key is tried until it is acknowledged; else each answer is final, whatever it is.
    """

    def __init__(self, count: int, address: str, *, stubborn: bool) -> None:
        self.address = address
        self.answers: list[Answer] = []
        self.untold: list[str] = []  # refusals that do not say when to try again, and what is no answer at all
        self._stubborn = stubborn
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._submit, args=(number,)) for number in range(count)]

    def __enter__(self) -> Clients:
        for each in self._threads:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for each in self._threads:
            each.join(PATIENCE)

    def _submit(self, number: int) -> None:
        place = 0
        with httpx.Client(timeout=60, verify=PLAIN) as client:
            while not self._over.is_set():
                key, place = f"{number}-{place}", place + 1
                while self._once(client, key) not in (200, 201) and self._stubborn:
                    time.sleep(0.02)

    def _once(self, client: httpx.Client, key: str) -> int:
        begun, status, job = time.monotonic(), 0, ""
        body = {"task": "work", "payload": {"key": key}}
        try:
            answer = client.post(f"{self.address}/v1/jobs", json=body, headers={"Idempotency-Key": key})
        except httpx.HTTPError:
            pass
        else:
            status, given = answer.status_code, answer.json()
            job = given.get("id", "")
            has_retry_after = answer.headers.get("retry-after", "").isdigit()
            if status == 503 and not (has_retry_after and given["code"] == "unavailable"):
                self.untold.append(answer.text)
        now = time.monotonic()
        self.answers.append(Answer(key, status, job, now, now - begun))
        return status

    @property
    def acknowledged(self) -> dict[str, str]:
        """The job of every key that was acknowledged."""
        return {each.key: each.job for each in list(self.answers) if each.status in (200, 201)}

    def more(self, number: int, *statuses: int) -> None:
        """Return when so many more of these answers have come."""
        least = self.count(*statuses) + number
        until(lambda: self.count(*statuses) >= least, PATIENCE, f"{number} more answers {statuses}", pause=0.01)

    def count(self, *statuses: int) -> int:
        """How many of these answers have come."""
        return sum(each.status in statuses for each in list(self.answers))


def judge(clients: Clients, database: Database, report: Report) -> None:
    """Every key that was acknowledged has one job, that of its answer; nothing else but 503 was ever answered."""
    acknowledged, owners, stored = clients.acknowledged, database.keys(), database.rows()
    lost = [key for key, job in acknowledged.items() if job not in stored]
    report.expect(not lost, f"{len(lost)} acknowledged jobs do not exist: {lost[:3]}")
    other = [key for key, job in acknowledged.items() if owners.get(key) != job]
    report.expect(not other, f"keys that stand for another job than was answered: {other[:3]}")
    report.expect(len(stored) == len(owners), f"{len(stored)} jobs for {len(owners)} keys")
    statuses = Counter(each.status for each in clients.answers)
    strange = set(statuses) - {0, 200, 201, 503}
    report.expect(not strange, f"answers that should not be: {sorted(strange)}")
    report.expect(not clients.untold, f"503 without a word on when to try again: {clients.untold[:1]}")
    report.expect((verdict := database.integrity()) == "ok", f"integrity: {verdict}")
    report.figures |= {"keys": len(acknowledged), "jobs": len(stored), "answers": dict(sorted(statuses.items()))}


# ── kill -9 of the API ────────────────────────────────────────────────────────────────────────────────────────────
def kills(folder: Path, home: Home, *, clients: int, kills: int, seed: int) -> Report:
    """The API is killed and started again under clients that retry with their keys: jobs = keys, none lost."""
    report, rng = Report(figures={"seed": seed, "kills": kills}), random.Random(seed)
    with home(folder) as url:
        served = Served(folder, url)
        try:
            with Clients(clients, served.address, stubborn=True) as crowd:
                for _ in range(kills):
                    crowd.more(1, 200, 201)
                    time.sleep(rng.uniform(*OPEN))
                    report.expect(served.process.poll() is None, "the API ended before it was killed")
                    served.kill()
                    served = Served(folder, url)
                    crowd.address = served.address
                crowd.more(2 * clients, 200, 201)
        finally:
            served.kill()
        database = database_of(url)
        judge(crowd, database, report)
        keys, jobs = len(crowd.acknowledged), len(database.rows())
        report.expect(keys == jobs, f"{jobs} jobs for {keys} keys that were all acknowledged")
    return report


# ── the store goes away ───────────────────────────────────────────────────────────────────────────────────────────
class Store(Protocol):
    """A store that can be away."""

    url: str

    def leave(self) -> None: ...

    def come_back(self) -> None: ...


class LockedFile:
    """A file whose write lock another program holds while it is away."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/holdfast.db"
        self._path = folder / "holdfast.db"
        self._other: sqlite3.Connection | None = None

    def leave(self) -> None:
        self._other = sqlite3.connect(self._path, isolation_level=None, timeout=30)
        self._other.execute("begin immediate")

    def come_back(self) -> None:
        assert self._other is not None
        self._other.close()


class ServerAway:
    """A server that is killed, and started again."""

    def __init__(self, server: Postgres | Redis, **parameters: str) -> None:
        self.url = server.url(**parameters)
        self.leave = server.kill
        self.come_back = server.start


class ServerFrozen:
    """A server that is stopped where it stands, and goes on: its connections last, and no new one is refused."""

    def __init__(self, server: Postgres | Redis, **parameters: str) -> None:
        self.url = server.url(**parameters)
        self._server = server
        self.come_back: Callable[[], None]

    def leave(self) -> None:
        self.come_back = self._server.freeze()


_Way = type[ServerAway] | type[ServerFrozen]


def _postgres(way: _Way) -> Callable[[Path], AbstractContextManager[Store]]:
    @contextmanager
    def home(folder: Path) -> Iterator[Store]:
        with Postgres() as server:
            yield way(server, schema="outages")

    return home


def _redis(way: _Way) -> Callable[[Path], AbstractContextManager[Store]]:
    @contextmanager
    def home(folder: Path) -> Iterator[Store]:
        with Redis(settings={"appendfsync": "always"}) as server:
            yield way(server, namespace="outages", durability="always")

    return home


@contextmanager
def _sqlite(folder: Path) -> Iterator[Store]:
    yield LockedFile(folder)


AWAY: dict[str, Callable[[Path], AbstractContextManager[Store]]] = {
    "sqlite": _sqlite,
    "postgres": _postgres(ServerAway),
    "postgres_frozen": _postgres(ServerFrozen),
    "redis": _redis(ServerAway),
    "redis_frozen": _redis(ServerFrozen),
}
"""By the name of the store, and of what happens to it."""


def outages(
    folder: Path, name: str, *, clients: int, times: int, max_refusal: float, within: float, seed: int
) -> Report:
    """The store goes away under load and comes back. Every request is answered, 503 within ``max_refusal`` seconds;
    once the store is back, every client is acknowledged again ``within`` seconds."""
    report, rng = Report(figures={"seed": seed, "outages": times}), random.Random(seed)
    back_in: list[float] = []
    with AWAY[name](folder) as store, Served(folder, store.url) as served:
        with Clients(clients, served.address, stubborn=False) as crowd:
            for _ in range(times):
                crowd.more(2 * clients, 201)
                store.leave()
                crowd.more(2 * clients, 503)
                time.sleep(rng.uniform(0, 1))
                store.come_back()
                back_in.append(_all_served(crowd, time.monotonic(), clients))
        judge(crowd, database_of(store.url), report)
        with served.client() as client:
            report.expect(client.get("/health/ready").status_code == 200, "not ready although the store is back")
    refusals = [each.seconds for each in crowd.answers if each.status == 503]
    slow = sum(seconds > max_refusal for seconds in refusals)
    report.expect(
        not slow, f"{slow} of {len(refusals)} refusals took over {max_refusal:g} s, one {max(refusals):.2f} s"
    )
    report.expect(max(back_in) <= within, f"a client was served {max(back_in):.2f} s after the store was back")
    report.expect(crowd.count(0) == 0, f"{crowd.count(0)} requests had no answer")
    report.figures |= {
        "503 after s, p50 and max": f"{percentile(refusals, 0.5):.2f} {max(refusals):.2f}",
        "recovered after s": f"{max(back_in):.2f}",
    }
    return report


def _all_served(crowd: Clients, since: float, clients: int) -> float:
    """Wait until every client was acknowledged something since then; the seconds that the last one waited."""

    def first() -> dict[str, float]:
        """When each client was first acknowledged after that."""
        served: dict[str, float] = {}
        for each in list(crowd.answers):
            if each.status == 201 and each.at > since:
                served.setdefault(each.key.partition("-")[0], each.at)
        return served

    until(lambda: len(first()) == clients, PATIENCE, "every client to be served again", pause=0.05)
    return max(first().values()) - since


# ── garbage, and what the description says ────────────────────────────────────────────────────────────────────────
def described(folder: Path, home: Home, *, examples: int, seed: int) -> Report:
    """Every operation is asked so many times by its description and against it: no error of ours, no answer but those
    described."""
    with home(folder) as url:
        found, asked = complaints(url, examples=examples, chance=seed)
    return Report(complaints=found, figures={"seed": seed, "operations": len(OPERATIONS), "requests": asked})


def garbage(folder: Path, home: Home) -> Report:
    """Garbage in every place of every operation: no error of ours, no answer but those described."""
    report, asked = Report(), 0
    with home(folder) as url, Api(url, **bad.BRIEF) as client:
        for operation in OPERATIONS:
            found, number = client.run(bad.complaints(client, operation), seconds=600)
            report.complaints += found
            asked += number
    report.figures |= {"operations": len(OPERATIONS), "requests": asked}
    return report
