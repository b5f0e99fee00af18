"""Whole workers in virtual time."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

from holdfast import Holdfast


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=30))
    return True


@pytest.fixture
def app(tmp_path: Path) -> Holdfast:
    """An application with no task yet; its settings file would be in the test's own folder."""
    return Holdfast(f"sqlite:///{tmp_path}/unused.db")
