"""Subjects of the queuectl example, each with a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
UNIT = {
    "validation of a job": "test_queuectl_cli.py::test_invalid_job_is_refused_and_nothing_is_stored",
    "the database": "test_queuectl_cli.py::test_writes_are_synchronous_and_in_wal_mode",
    "the configuration": "test_queuectl_cli.py::test_defaults_apply_without_a_settings_file",
    "transitions of states": "test_queuectl_cli.py::test_status_and_list_show_every_job_and_state",
}
INTEGRATION = {
    "end to end": "test_queuectl_workers.py::test_command_line_runs_jobs_from_enqueue_to_end",
    "several workers": "test_queuectl_workers.py::test_two_processes_never_take_the_same_job",
    "everything after a restart": "test_queuectl_cli.py::test_everything_is_kept_after_a_restart",
    "dead letters": "test_queuectl_cli.py::test_dead_letter_queue_is_listed_and_retried",
}


@pytest.mark.rows("Q70", "Q71")
@pytest.mark.parametrize("subjects", [UNIT, INTEGRATION], ids=["unit", "integration"])
def test_layer_has_tests_of_each_subject(subjects: dict[str, str]) -> None:
    """They run with all others, and none of them may be left out."""
    marks = {test: _marks(*test.split("::")) for test in subjects.values()}
    assert [test for test, found in marks.items() if found & {"skip", "skipif", "xfail", "storm"}] == []


def _marks(file: str, name: str) -> set[str]:
    """Returns the marks of a test; ValueError if there is no such test."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    (test,) = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
    assigned = [each for each in tree.body if isinstance(each, ast.Assign)]
    module = [each.value for each in assigned if ast.unparse(each.targets[0]) == "pytestmark"]
    marked = " ".join(map(ast.unparse, [*test.decorator_list, *module]))
    return set(re.findall(r"pytest\.mark\.(\w+)", marked))
