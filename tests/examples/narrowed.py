"""Plugin of pytest (``-p tests.examples.narrowed``): prints the files of what it collected, and runs only one test.

The test is named by NARROWED_TO. The command of a README would otherwise run the test that runs it.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Acts after ``-k``."""
    print("collected", *sorted({item.path.name for item in items}))
    items[:] = [item for item in items if item.name.partition("[")[0] == os.environ["NARROWED_TO"]]
