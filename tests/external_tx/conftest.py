"""What the tests of callers' transactions share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.external_tx.support import Place
from tests.support.postgres import Postgres


@pytest.fixture
def place(postgres: Postgres, postgres_url: str) -> Iterator[Place]:
    place = Place(postgres, postgres_url)
    yield place
    place.close()
