"""Subjects of the queuectl example, each with a test that passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.queuectl_support import ROOT

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
def test_layer_has_passing_tests_of_each_subject(subjects: dict[str, str]) -> None:
    here = Path(__file__).parent
    tests = [str(here / test) for test in subjects.values()]
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-rA", *tests]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    passed = set(re.findall(r"^PASSED \S+/(test_\w+\.py::\w+)", ran.stdout, re.MULTILINE))
    assert passed == set(subjects.values())
