"""How much memory this process uses: ``worker/executors/process_group.py``."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from holdfast.worker.executors.process_group import resident_bytes

MIB = 1 << 20


def test_what_is_held_counts_in_bytes() -> None:
    before = resident_bytes()
    held = bytearray(64 * MIB)
    held[::4096] = b"x" * len(held[::4096])

    assert 48 * MIB < resident_bytes() - before < 128 * MIB
    assert 4 * MIB < before < 8192 * MIB


def test_resident_bytes_fall_back_to_the_peak_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr("sys.platform", "linux")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    assert peak <= resident_bytes() < peak + 512 * MIB
