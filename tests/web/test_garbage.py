"""Garbage in every place of every operation is refused, or harmless: never an error of ours, nor an unknown answer.

Here a part of it; all of it in the storm.
"""

from __future__ import annotations

import pytest

from holdfast.web.asgi import OPERATIONS
from tests.web.client import Api
from tests.web.garbage import BRIEF, complaints

PATIENCE = 240  # seconds on a machine that has much else to do; five where it has not
pytestmark = pytest.mark.timeout(PATIENCE + 20)


def test_garbage_meets_no_error_of_ours(home: str) -> None:
    step = 17 if home.startswith("sqlite") else 127  # one in so many requests: all of them take a minute

    async def ask() -> list[str]:
        found: list[str] = []
        for operation in OPERATIONS:
            some, asked = await complaints(api, operation, step=step)
            assert asked, operation.name
            found += some
        return found

    with Api(home, **BRIEF) as api:
        found = api.run(ask(), seconds=PATIENCE)
    assert not found, "\n".join(found[:20])
