"""pytest plugin of Holdfast: fixtures for tests of applications that submit jobs.

pytest loads this module in every run where Holdfast is installed, so it stands outside the package and imports
nothing of it before a test asks for one of its fixtures. All its names begin with ``holdfast_``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast import Holdfast
    from holdfast.testing import EnqueuedJobs, Harness, TemporaryStore

_MODES = ("manual", "inline", "harness")
_FIXTURES = {"holdfast_jobs", "holdfast_clock"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the settings of the plugin."""
    parser.addini("holdfast_app", "Holdfast: the application under test, as module:attribute")


def pytest_configure(config: pytest.Config) -> None:
    """Describes the marker."""
    config.addinivalue_line(
        "markers", 'holdfast(mode): run the test in this mode of Holdfast: "manual" (default), "inline" or "harness"'
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Enters the mode of a test ahead of its other fixtures: these may start the application."""
    if not isinstance(item, pytest.Function):
        return
    if _FIXTURES.intersection(item.fixturenames) or item.get_closest_marker("holdfast"):
        others = [name for name in item.fixturenames if name != "holdfast_jobs"]
        item.fixturenames = ["holdfast_jobs", *others]  # a new list: other tests may share the old one


@pytest.fixture(scope="session")
def holdfast_app(request: pytest.FixtureRequest) -> Holdfast:
    """The application under test: override this fixture, or name it in the setting ``holdfast_app`` of pytest."""
    target = str(request.config.getini("holdfast_app"))
    if not target:
        raise pytest.UsageError(
            "holdfast_app: there is no application to test; define a fixture of this name that returns it, or add "
            "holdfast_app = module:attribute to the settings of pytest"
        )
    from holdfast.cli.loading import load_application

    return load_application(target, "pytest")


@pytest.fixture(scope="session")
def holdfast_url() -> str | None:
    """The URL of the tests' database, for jobs in its transactions; None: each test has a private SQLite file."""
    return None


@pytest.fixture(scope="session")
def holdfast_store(holdfast_url: str | None) -> Iterator[TemporaryStore | None]:
    """A store on that database for all tests of the run, emptied after each of them and removed in the end."""
    if holdfast_url is None:
        yield None
        return
    from holdfast import testing

    with testing.temporary_store(holdfast_url) as store:
        yield store


@pytest.fixture
def holdfast_jobs(
    request: pytest.FixtureRequest, holdfast_app: Holdfast, holdfast_store: TemporaryStore | None
) -> Iterator[EnqueuedJobs]:
    """The jobs that the test enqueues. The marker ``holdfast`` says whether and when they run."""
    from holdfast import testing

    mode = _read_mode(request)
    if mode == "harness":
        request.getfixturevalue("holdfast_clock")
        yield testing.EnqueuedJobs(holdfast_app)
        return
    enter = testing.inline if mode == "inline" else testing.manual
    with enter(holdfast_app, url=holdfast_store):
        yield testing.EnqueuedJobs(holdfast_app)


@pytest.fixture
def holdfast_clock(
    request: pytest.FixtureRequest, holdfast_app: Holdfast, holdfast_store: TemporaryStore | None
) -> Iterator[Harness]:
    """A harness: a store and a clock that only the test moves for test and fixtures, workers in the async test."""
    from holdfast import testing

    if _read_mode(request) != "harness":
        raise pytest.UsageError("holdfast_clock: only a harness has a clock; mark the test holdfast('harness')")
    test = request.node
    function: Any = getattr(test, "obj", None)
    holder, name = (function.hypothesis, "inner_test") if hasattr(function, "hypothesis") else (test, "obj")
    function = getattr(holder, name, None)
    if not inspect.iscoroutinefunction(function):
        raise pytest.UsageError(f"holdfast_clock: {test.name} is not async; a harness needs an event loop: async def")
    harness = testing.Harness(holdfast_app, url=holdfast_store)

    @functools.wraps(function)
    async def run_in_harness(*args: Any, **arguments: Any) -> None:
        async with harness:
            await function(*args, **arguments)

    setattr(holder, name, run_in_harness)
    try:
        with harness.private_store():
            yield harness
    finally:
        setattr(holder, name, function)  # for a rerun


def _read_mode(request: pytest.FixtureRequest) -> str:
    """Returns the mode of the test; the clock implies that of a harness."""
    marker = request.node.get_closest_marker("holdfast")
    has_clock = "holdfast_clock" in request.fixturenames
    if marker is None or (not marker.args and not marker.kwargs):
        return "harness" if has_clock else "manual"
    given = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else (*marker.args, marker.kwargs)
    if given not in _MODES:
        raise pytest.UsageError(f"holdfast: {given!r} is no mode; give one of these: {', '.join(_MODES)}")
    return str(given)
