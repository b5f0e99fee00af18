"""Every row of the requirements of the Atlas Jobs seed has a check that is named by it."""

from __future__ import annotations

from tests.examples.rows import checked_rows


def test_every_row_is_checked() -> None:
    """What J15, J57 and J77 say of Docker is checked by reading the compose file: no test needs an engine."""
    assert checked_rows("test_atlas_*.py", "j") == set(range(1, 83))
