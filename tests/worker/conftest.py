"""Whole workers in virtual time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast
from tests.support.sessions import KeptSessions, TestLoop, run_on_test_loop
from tests.support.stores import CARRIED, MIGRATED, SERVED, one_of, stores_of

pytest_pyfunc_call = run_on_test_loop


@pytest.fixture(autouse=True)
def runner(
    request: pytest.FixtureRequest, runner: TestLoop, sessions: KeptSessions, monkeypatch: pytest.MonkeyPatch
) -> TestLoop:
    """The loop of everything asynchronous in a test. Without prepared statements, as behind a pooler, a server takes
    four times as long: that is for every eighth test, by its name."""
    if zlib.crc32(request.function.__name__.encode()) % 8:
        sessions.use_in(monkeypatch, prepared=True)
    return runner


ONE_SERVER = {
    "test_batches": "test_batches",
    "test_children": "test_children",
    "test_deferral": "test_settle",
    "test_encryption_keys": "test_payload_text",
    "test_expires": "test_expires",
    "test_handlers": "test_settle",
    "test_history": "test_history",
    "test_in_process": "test_settle",
    "test_interruptions": "test_cancel",
    "test_late_steps": "test_steps",
    "test_lines": "test_job_logs",
    "test_order": "test_claim",
    "test_prefetch": "test_last_attempts",
    "test_retries": "test_settle",
    "test_roles": "test_maintenance",
    "test_saved_values": "test_steps",
    "test_schedules": "test_schedules",
    "test_spoiled_definitions": "test_spoiled_definitions",
    "test_steps": "test_steps",
    "test_steps_ends": "test_steps",
    "test_stop": "test_settle",
    "test_superseded_jobs": "test_cancel",
    "test_waits": "test_signals",
    "test_withdrawn_definitions": "test_schedules",
    "test_workflow_bounds": "test_dependencies",
}
"""Files about what workers do with the answers of a store, each with the file of tests/conformance that asserts these
answers of every store. They run on SQLite and, by the test's name, on one server."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "home" in metafunc.fixturenames:
        file, test = metafunc.module.__name__.rpartition(".")[2], metafunc.function.__name__
        names = one_of(CARRIED, stores_of(file, older=False), test)
        metafunc.parametrize("home", one_of(SERVED, names, test) if file in ONE_SERVER else names, indirect=True)


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database. The harness brings the news: what came of the server's own would be luck."""
    with MIGRATED[request.param](tmp_path) as url:
        yield f"{url}&pooled=1" if url.startswith("postgresql:") else url


@pytest.fixture
def app(home: str) -> Holdfast:
    """An application with no task yet and an empty database; its settings file would be in the test's own folder."""
    return Holdfast(home)
