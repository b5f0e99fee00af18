"""What every test shares: a PostgreSQL of its process, and how hard Hypothesis looks.

``HYPOTHESIS_PROFILE=ci`` looks harder, and never at random.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.postgres import Postgres, shared

settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=200, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def postgres() -> Postgres:
    """A running server, PostgreSQL of the main version, that the tests of this process share: spare it."""
    return shared()


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a schema of the test's own, which is not there yet."""
    with postgres.fresh_schema() as schema:
        yield postgres.url(schema=schema)
