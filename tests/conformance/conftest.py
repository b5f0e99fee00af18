"""One suite for every store, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.clock import ManualClock
from holdfast.stores.base import Store
from tests.conformance.support import Opener
from tests.support.keys import Keys
from tests.support.sessions import TestLoop, run_on_test_loop
from tests.support.stores import CARRIED, MIGRATED, VERSIONS, one_of, stores_of

pytest_pyfunc_call = run_on_test_loop


@pytest.fixture(autouse=True)
def runner(runner: TestLoop) -> TestLoop:
    """The loop of everything asynchronous in a test."""
    return runner


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


ONE_OF_A_KIND = {
    "test_batches",
    "test_cancel",
    "test_children",
    "test_children_keys",
    "test_corrupt_jobs",
    "test_dependencies",
    "test_dependencies_many",
    "test_error_groups",
    "test_events",
    "test_given_ids",
    "test_history",
    "test_ids",
    "test_job_logs",
    "test_keys",
    "test_payload_text",
    "test_query",
    "test_schedules",
    "test_signals",
    "test_stats",
    "test_steps",
    "test_tagged_jobs",
}
"""Files whose subject is the same over every transport and on every version of a server: a test runs over one of the
transports, and on one version of each server. What a transport has code of its own for is tested on each, here and in
tests/transports: submission, claims, settlement, leases, waiting, edits, replays, limits. So are query plans."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "home" in metafunc.fixturenames:
        file = metafunc.module.__name__.rpartition(".")[2]
        names = stores_of(file)
        if file in ONE_OF_A_KIND:
            for group in (CARRIED, *VERSIONS):
                names = one_of(group, names, metafunc.function.__name__)
        metafunc.parametrize("home", names, indirect=True)


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database. Tests about what opening makes say that theirs has not been opened:
    ``HOMES = STORES``."""
    homes = getattr(request.module, "HOMES", MIGRATED)
    with homes[request.param](tmp_path) as url:
        yield url


@pytest.fixture
def carried(request: pytest.FixtureRequest) -> bool:
    """Whether a transport carries the ready jobs: then they come in the order of their arrival there, one at a time to
    a waiter."""
    return request.node.callspec.params["home"] in CARRIED


@pytest.fixture
def opener(runner: TestLoop, clock: ManualClock, home: str) -> Iterator[Opener]:
    """``await opener()``: one more store object on the test's database."""
    opener = Opener(home, clock)
    yield opener
    runner.run(opener.close())


@pytest.fixture
def keys(home: str) -> Iterator[Keys]:
    """The keys of the test's own namespace in Redis."""
    keys = Keys(home)
    yield keys
    keys.client.close()


@pytest.fixture
def store(runner: TestLoop, opener: Opener) -> Store:
    """A store on an empty database."""
    return runner.run(opener())
