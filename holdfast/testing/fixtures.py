"""Fixtures for pytest: ``pytest_plugins = ["holdfast.testing.fixtures"]`` in the top ``conftest.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.app import Holdfast
from holdfast.testing.chaos import ChaosReport, run_chaos
from holdfast.testing.scenario import load_scenario

RunScenario = Callable[..., ChaosReport]


@pytest.fixture
def chaos() -> RunScenario:
    """Runs a scenario: ``report = chaos(app, "worker-crash", target="shop:app", jobs=50)``; then assert on it.

    Further arguments replace values of the scenario: task, payload, jobs, workers, span, deadline, seed, effects.
    """

    def run_scenario(app: Holdfast, scenario: str, *, target: str, **values: Any) -> ChaosReport:
        return asyncio.run(run_chaos(app, load_scenario(scenario).with_values(**values), target=target))

    return run_scenario
