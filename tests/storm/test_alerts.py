"""Each shipped alert has the cases that the storm evaluates, and a missing promtool is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storm.alerts import CASES, alerts, evaluated


@pytest.mark.parametrize("alert", alerts())
def test_alert_has_firing_and_silent_cases(alert: str) -> None:
    assert {case.summary is None for case in CASES if case.alert == alert} == {False, True}


def test_missing_promtool_is_a_complaint_with_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    [complaint] = evaluated(tmp_path).complaints

    assert "install the Debian package prometheus" in complaint
