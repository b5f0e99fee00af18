"""The store stops and starts again under submitting clients: 503 and never a 2xx for what is not stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from holdfast import Holdfast
from tests.support.postgres import Postgres, shared
from tests.support.redis import Redis
from tests.web.client import Api
from tests.web.serving import Served

SERVERS = {"postgres": Postgres, "redis": lambda: Redis(settings={"appendonly": "yes", "appendfsync": "always"})}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Postgres | Redis]:
    """A server of the test's own."""
    with SERVERS[request.param]() as server:
        yield server


class _Clients:
    """Four clients that submit one keyed job after the other, whatever is answered."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = threading.Event()
        self.answers: list[tuple[str, int, float]] = []  # key, status, seconds it took
        self.untold: list[httpx.Response] = []  # 503 without saying when to try again
        self._threads = [threading.Thread(target=self._submit, args=(number,)) for number in range(4)]
        for each in self._threads:
            each.start()

    def _submit(self, number: int) -> None:
        place = 0
        with httpx.Client(base_url=self._address, timeout=60) as client:
            while not self._over.is_set():
                key, place, begun = f"{number}-{place}", place + 1, time.monotonic()
                answer = client.post("/v1/jobs", json={"type": "work", "payload": {}, "key": key})
                self.answers.append((key, answer.status_code, time.monotonic() - begun))
                if answer.status_code == 503 and not (
                    answer.headers.get("retry-after", "").isdigit() and answer.json()["code"] == "unavailable"
                ):
                    self.untold.append(answer)

    def count(self, *statuses: int) -> int:
        return sum(status in statuses for _, status, _ in list(self.answers))

    def more(self, number: int, *statuses: int) -> None:
        """Return when so many more of these answers have come."""
        least, until = self.count(*statuses) + number, time.monotonic() + 60
        while self.count(*statuses) < least:
            assert time.monotonic() < until, self.answers[-20:]
            time.sleep(0.02)

    def end(self) -> None:
        self._over.set()
        for each in self._threads:
            each.join()


def test_a_store_that_is_away_is_told_and_nothing_is_pretended(server: Postgres | Redis, tmp_path: Path) -> None:
    url = server.url()
    with Served(tmp_path, url) as served, served.client() as client:
        clients = _Clients(served.address)
        try:
            clients.more(20, 201)
            server.stop()
            clients.more(4, 503)
            assert client.get("/health").status_code == client.get("/health/live").status_code == 200
            assert client.get("/health/ready").status_code == 503
            assert client.get("/v1/jobs").status_code == 503
            server.start()
            clients.more(20, 201)
        finally:
            clients.end()
        assert client.get("/health/ready").status_code == 200
        assert {status for _, status, _ in clients.answers} <= {201, 200, 503}
        assert clients.untold == []
        slowest = max(seconds for _, status, seconds in clients.answers if status == 503)
        assert slowest < 15  # two seconds on an idle machine
        app = Holdfast(url)
        for key, status, _ in clients.answers:
            if status != 503:
                assert app.sync.get(f"key:{key}").key == key
        app.sync.close()


def test_it_starts_while_the_store_is_away_and_finds_it_later(server: Postgres | Redis, tmp_path: Path) -> None:
    url = server.url()
    server.stop()
    with Served(tmp_path, url) as served, served.client() as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/jobs", json={"type": "work", "payload": {}}).status_code == 503
        server.start()
        until = time.monotonic() + 30
        while client.post("/v1/jobs", json={"type": "work", "payload": {}}).status_code != 201:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert served.stop() == 0


def test_a_wake_up_that_could_not_be_sent_is_told() -> None:
    with shared().fresh_schema() as schema, Redis() as redis:
        settings = {"transport": "redis_list", "transport_url": redis.url()}
        with Api(shared().url(schema=schema), **settings) as api:
            assert "wake_up" not in api.submit()
            redis.kill()
            assert api.submit()["wake_up"] == "delayed"
            stored = api.post("/v1/jobs/batch", {"jobs": [{"type": "work", "payload": {}}] * 2}, 201)["jobs"]
            assert [each["wake_up"] for each in stored] == ["delayed"] * 2
