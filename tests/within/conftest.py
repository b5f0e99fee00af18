"""What the tests of callers' transactions share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgres import Postgres
from tests.within.support import Place


@pytest.fixture
def place(postgres: Postgres, postgres_url: str) -> Iterator[Place]:
    place = Place(postgres, postgres_url)
    yield place
    place.close()
