"""The storm remembers what is done, and only for the code it was done with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.report import Report
from tests.storm.runner import Storm, fingerprint
from tests.storm.scenarios import Scenario


@pytest.fixture
def ran() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def scenarios(ran: list[tuple[str, int]]) -> dict[str, Scenario]:
    def scenario(name: str, *complaints: str) -> Scenario:
        def run(folder: Path, count: Callable[[int], int], seed: int) -> Report:
            ran.append((name, count(10)))
            return Report(complaints=list(complaints), figures={"seed": seed})

        return run

    def raising(folder: Path, count: Callable[[int], int], seed: int) -> Report:
        raise RuntimeError("unforeseen")

    return {"good": scenario("good"), "bad": scenario("bad", "a job was lost"), "raising": raising}


def test_a_kept_promise_is_not_tried_again(
    tmp_path: Path, scenarios: dict[str, Scenario], ran: list[tuple[str, int]]
) -> None:
    state = tmp_path / "state" / "storm.json"

    assert Storm(state, 0.5, "code", scenarios).run(["good"])
    assert Storm(state, 0.5, "code", scenarios).run(["good"])
    assert ran == [("good", 5)]


@pytest.mark.parametrize(("scale", "code"), [(1.0, "code"), (0.5, "other code")])
def test_other_counts_or_other_code_begin_a_new_storm(
    tmp_path: Path, scenarios: dict[str, Scenario], ran: list[tuple[str, int]], scale: float, code: str
) -> None:
    Storm(tmp_path / "storm.json", 0.5, "code", scenarios).run(["good"])
    Storm(tmp_path / "storm.json", scale, code, scenarios).run(["good"])

    assert len(ran) == 2


@pytest.mark.parametrize("name", ["bad", "raising"])
def test_broken_promise_is_reported_and_retried(tmp_path: Path, scenarios: dict[str, Scenario], name: str) -> None:
    storm = Storm(tmp_path / "storm.json", 1.0, "code", scenarios)

    assert not storm.run(["good", name])
    assert "1 of 1 BROKEN" in storm.table(["good", name])
    again = Storm(tmp_path / "storm.json", 1.0, "code", scenarios)
    assert not again.run(["good", name])
    assert "2 of 2 BROKEN" in again.table(["good", name])


def test_broken_promise_stays_on_record_after_a_later_success(tmp_path: Path, scenarios: dict[str, Scenario]) -> None:
    Storm(tmp_path / "storm.json", 1.0, "code", scenarios).run(["bad"])
    storm = Storm(tmp_path / "storm.json", 1.0, "code", {"bad": scenarios["good"]})

    assert not storm.run(["bad"])
    assert "1 of 2 BROKEN" in storm.table(["bad"])
    assert f"bad, seed {storm.runs['bad'][0]['seed']}: a job was lost" in storm.table(["bad"])


@pytest.mark.parametrize("name", ["module.py", "queries.sql", "claim.lua", "worker.mjs", "holdfast.js", "rules.yml"])
def test_the_fingerprint_changes_with_the_code(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("one = 1\n")
    before = fingerprint(tmp_path)
    (tmp_path / name).write_text("one = 2\n")

    assert fingerprint(tmp_path) != before


@pytest.mark.timeout(300)
def test_scenarios_in_parallel_run_in_own_processes(tmp_path: Path) -> None:
    names = ["stubborn-sqlite", "fork-sqlite"]
    storm = Storm(tmp_path / "storm.json", 0.1, "code", parallel=2)

    assert storm.run(names), storm.table(names)
    assert [len(storm.runs[name]) for name in names] == [1, 1]
    assert Storm(tmp_path / "storm.json", 0.1, "code", parallel=2).run(names)


def test_scenario_whose_process_dies_counts_as_broken(tmp_path: Path) -> None:
    storm = Storm(tmp_path / "storm.json", 1.0, "code", parallel=2)

    assert not storm.run(["no such scenario"])
    assert "its process ended with status 1" in storm.table(["no such scenario"])
