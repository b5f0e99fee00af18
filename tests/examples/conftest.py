"""The packages of the examples are found as if they were installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import atlas_support, delayed_support, queuectl_support
from tests.support.redis import shared

sys.path[:0] = [str(each.EXAMPLE) for each in (queuectl_support, atlas_support, delayed_support)]


@pytest.fixture
def delayed(tmp_path: Path) -> Iterator[delayed_support.Delayed]:
    """Delayed Queue, empty, on the Redis that the tests of this process share."""
    delayed = delayed_support.Delayed(shared(), tmp_path)
    yield delayed
    delayed.close()
