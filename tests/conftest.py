"""What every test shares: a PostgreSQL of its process, and how hard Hypothesis looks.

``HYPOTHESIS_PROFILE=ci`` looks harder, and never at random.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.postgres import Postgres, shared
from tests.support.schemas import migrated_schema

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


@pytest.fixture
def postgres() -> Postgres:
    """A running server, PostgreSQL of the main version, that the tests of this process share: spare it."""
    return shared()


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a schema without a job, for this test alone."""
    with migrated_schema(postgres.major) as schema:
        yield postgres.url(schema=schema)
