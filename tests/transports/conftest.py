"""PostgreSQL with a transport: real servers, real time but for the store's clock."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis import FLOORS, MAIN, Redis, shared
from tests.support.sessions import TestLoop, run_on_test_loop
from tests.support.stores import CARRIED, MIGRATED
from tests.transports.support import Pairing

pytest_pyfunc_call = run_on_test_loop


@pytest.fixture(autouse=True)
def runner(runner: TestLoop) -> TestLoop:
    """The loop of everything asynchronous in a test."""
    return runner


@pytest.fixture(params=sorted(CARRIED))
def pairing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pairing]:
    """An empty schema and keys of the test's own, on servers that are spared."""
    with MIGRATED[request.param](tmp_path) as url:
        yield Pairing(url, shared())


@pytest.fixture
def redis_of_its_own(request: pytest.FixtureRequest) -> Iterator[Redis]:
    """A Redis to be emptied, stopped and filled up, of one of the versions there are: the test's name says which."""
    kinds = (MAIN, *FLOORS)
    with Redis(kinds[zlib.crc32(request.node.name.encode()) % len(kinds)]) as server:
        yield server


@pytest.fixture(params=["redis_list", "redis_stream"])
def rough(request: pytest.FixtureRequest, postgres_url: str, redis_of_its_own: Redis) -> Pairing:
    """An empty schema, and a Redis that the test may hurt."""
    return Pairing(
        postgres_url,
        redis_of_its_own,
        transport=request.param,
        transport_url=redis_of_its_own.url(),
        transport_key="atlas:jobs",
        transport_dead_key="atlas:dlq",
    )
