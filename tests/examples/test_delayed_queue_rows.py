"""Every row of the requirements of the Delayed Queue seed has a check that is named by it."""

from __future__ import annotations

from tests.examples.rows import checked_rows


def test_every_row_is_checked() -> None:
    """49 to 54 are checked by what they are for: partitions were not built, since nothing needs them."""
    assert checked_rows("test_delayed_queue_*.py", "d") == set(range(1, 57))
