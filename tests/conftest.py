"""What every test shares: a PostgreSQL of its process, and how hard Hypothesis looks.

``HYPOTHESIS_PROFILE=ci`` looks harder, and never at random.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tests.support.postgres import Postgres, shared
from tests.support.schemas import migrated_schema
from tests.support.sessions import KeptSessions, TestLoop

settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=200, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would every program that a test starts. One that is
    heard here is heard there: a program inherits what is ignored, and gets the default for what has a handler."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the modules and items of the run out of garbage collections: these took a third of the CPU time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture
def postgres() -> Postgres:
    """A running server, PostgreSQL of the main version, that the tests of this process share: spare it."""
    return shared()


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a schema without a job, for this test alone."""
    with migrated_schema(postgres.major) as schema:
        yield postgres.url(schema=schema)


@pytest.fixture(scope="session")
def shared_runner() -> Iterator[asyncio.Runner]:
    """The event loop of all tests whose stores hand on their sessions."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def sessions(shared_runner: asyncio.Runner) -> Iterator[KeptSessions]:
    """Sessions that the stores of one test leave to those of the next."""
    sessions = KeptSessions(shared_runner.get_loop())
    yield sessions
    shared_runner.run(sessions.close())


@pytest.fixture
def runner(
    request: pytest.FixtureRequest,
    shared_runner: asyncio.Runner,
    sessions: KeptSessions,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TestLoop]:
    """The shared event loop, for one test. Its stores take their sessions from the tests before, unless its module has
    ``NEW_SESSIONS``."""
    if not getattr(request.module, "NEW_SESSIONS", False):
        sessions.use_in(monkeypatch)
    loop = TestLoop(shared_runner)
    yield loop
    loop.close()
