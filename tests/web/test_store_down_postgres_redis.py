"""No store, or no transport, when the API starts: reported, and waited for. See ``test_crash_api.py``
for stores that go away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.web.asgi import OPERATIONS
from holdfast.web.routing import Operation
from tests.support.load import slowness
from tests.support.postgres import Postgres, shared
from tests.support.redis import Redis
from tests.web.client import Api
from tests.web.garbage import usual
from tests.web.serving import Served

WITHOUT_STORE = {
    *("check_health", "check_live", "show_openapi", "show_docs", "show_docs_asset"),
    *("show_metrics", "show_metrics_at_slash"),
    "start_faults",  # these settings allow none
}
"""Operations that answer all the same."""
SERVERS = {"postgres": Postgres, "redis": lambda: Redis(settings={"appendonly": "yes", "appendfsync": "always"})}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Postgres | Redis]:
    """A server of the test's own."""
    with SERVERS[request.param]() as server:
        yield server


def test_api_starts_without_its_store_and_finds_it_later(server: Postgres | Redis, tmp_path: Path) -> None:
    url = server.url()
    server.stop()
    with Served(tmp_path, url) as served, served.client() as client:
        assert client.get("/health").status_code == client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == client.get("/v1/jobs").status_code == 503
        assert client.post("/v1/jobs", json={"task": "work", "payload": {}}).status_code == 503
        server.start()
        until = time.monotonic() + 90
        while client.post("/v1/jobs", json={"task": "work", "payload": {}}).status_code != 201:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert served.stop() == 0


def test_every_operation_says_that_the_store_is_away(server: Postgres | Redis, tmp_path: Path) -> None:
    """Within two seconds on a machine that has nothing else to do; those that wait do not wait for the store."""

    def status_of(operation: Operation) -> int:
        asked, begun = usual(operation), time.monotonic()
        with (
            served.client() as client,
            client.stream(asked.method, asked.target, content=asked.body, headers=asked.headers) as answer,
        ):
            assert time.monotonic() - begun < 10 * slowness(), operation.name
            if answer.status_code == 503:
                answer.read()
                assert answer.headers["retry-after"].isdigit()
                assert answer.json()["code"] == "unavailable"
                assert "127.0.0.1" not in answer.text
            return answer.status_code

    with Served(tmp_path, server.url()) as served, ThreadPoolExecutor(len(OPERATIONS)) as threads:
        with served.client() as client:
            assert client.post("/v1/jobs", json={"task": "work", "payload": {}}).status_code == 201
        server.kill()
        statuses = dict(zip([each.name for each in OPERATIONS], threads.map(status_of, OPERATIONS), strict=True))
    answered = {name for name, status in statuses.items() if status != 503}
    assert answered == WITHOUT_STORE, statuses
    trouble = served.line("store_trouble")
    assert ("127.0.0.1" in trouble["error"], trouble["service"]) == (True, "api")
    assert trouble["request_id"]


def test_failed_notification_is_reported_as_delayed_wake_up() -> None:
    with shared().fresh_schema() as schema, Redis() as redis:
        settings = {"transport": "redis_list", "transport_url": redis.url()}
        with Api(shared().url(schema=schema), hurried=True, **settings) as api:
            assert "wake_up" not in api.submit()
            redis.kill()
            assert api.submit()["wake_up"] == "delayed"
            stored = api.post("/v1/jobs/batch", {"jobs": [{"task": "work", "payload": {}}] * 2}, 201)["jobs"]
            assert [each["wake_up"] for each in stored] == ["delayed"] * 2
