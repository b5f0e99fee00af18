"""Short histories on each kind of store; ``make storm`` writes long ones."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from tests.crash.report import kept
from tests.storm.history.faults import CHANGES, change_statements
from tests.storm.history.scenario import faults_found, histories


@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["sqlite", "postgres", "redis"])
def test_short_history_keeps_every_promise(tmp_path: Path, store: str) -> None:
    assert kept(histories(tmp_path, store, seconds=1.5, seed=1))


@pytest.mark.timeout(300)
def test_built_in_fault_is_found(tmp_path: Path) -> None:
    assert kept(faults_found(tmp_path, within=120, seed=1, faults=["sweep-before-lease-end"]))


@pytest.mark.parametrize("fault", CHANGES)
def test_built_in_fault_still_fits_its_statements(fault: str) -> None:
    source = files("holdfast.stores.sqlite") / "queries.sql"

    assert change_statements(source, CHANGES[fault]) != change_statements(source, [])
