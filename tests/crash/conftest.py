"""What the crash tests share."""

from __future__ import annotations

import random

import pytest


@pytest.fixture
def seed() -> int:
    """For a scenario's own generator; it follows pytest's, and a failure shows it."""
    return random.randrange(1 << 32)
