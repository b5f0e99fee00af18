"""The lock files of SQLite's writers, beside a process that is frozen or interrupted there."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.stores.sqlite import writer
from holdfast.stores.sqlite.writer import FairLock


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "holdfast.db")


@pytest.fixture
def fair_lock(path: str) -> Iterator[FairLock]:
    fair_lock = FairLock(path)
    yield fair_lock
    fair_lock.close()


def take(file: str) -> int:
    """Lock a file as another process does that is about to write."""
    number = os.open(file, os.O_RDWR)
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return number


@pytest.mark.parametrize("name", ["-turn", "-lock"])
def test_frozen_process_delays_another_once(
    fair_lock: FairLock, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = take(path + name)
    monkeypatch.setattr(writer, "_SKIP_FAIRNESS_SECONDS", 600.0)
    monkeypatch.setattr(writer, "LOCK_TIMEOUT", 0.01)
    fair_lock.acquire_lock()
    fair_lock.release_lock()
    monkeypatch.setattr(writer, "LOCK_TIMEOUT", 30.0)

    began = time.monotonic()
    for _ in range(2):
        fair_lock.acquire_lock()
        fair_lock.release_lock()

    assert time.monotonic() - began < 15
    os.close(frozen)


def test_interrupted_wait_keeps_no_file(fair_lock: FairLock, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = take(path + "-lock")

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fair_lock.acquire_lock()
    os.close(writes)

    for name in ("-turn", "-lock"):
        os.close(take(path + name))
    fair_lock.acquire_lock()
    fair_lock.release_lock()
