"""The pytest plugin, in runs of pytest of their own."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import psycopg
import pytest

from tests.support.pages import ROOT, find_modules
from tests.support.postgres import Postgres

PAGE = ROOT / "docs" / "testing-transactions.md"
SHOP = """
from holdfast import Holdfast

app = Holdfast("sqlite:///real.db")
sent = []


@app.task("send", max_attempts=2)
async def send(to: str) -> None:
    sent.append(to)
    if to == "unknown":
        raise ConnectionError("unknown")
"""
SETTINGS = "[pytest]\nholdfast_app = shop:app\nfilterwarnings = error\n"
MODES = """
def test_manual(holdfast_jobs):
    send.sync.enqueue("ann")
    (job,) = holdfast_jobs.assert_enqueued(task=send, args={"to": "ann"})
    assert ([*holdfast_jobs], len(holdfast_jobs), holdfast_jobs.find(task="other"), sent) == ([job], 1, [], [])
    holdfast_jobs.refute_enqueued(task="other")


@pytest.mark.holdfast("inline")
class TestInline:
    def test_inline(self):
        send.sync.enqueue("bob")
        assert sent == ["bob"]

    def test_error(self, holdfast_jobs):
        with pytest.raises(ConnectionError):
            send.sync.enqueue("unknown")


@pytest.mark.anyio
async def test_on_demand(holdfast_jobs):
    await send.enqueue("cid")
    assert sent == []
    await holdfast_jobs.run()
    assert sent == ["cid"]


@pytest.mark.anyio
async def test_clock(holdfast_clock, holdfast_jobs):
    job = await send.options(delay=3600).enqueue("dan")
    await holdfast_clock.advance(3599)
    assert (sent, len(holdfast_jobs)) == ([], 1)
    await holdfast_clock.advance(1)
    assert await job.state() == "succeeded"


@pytest.mark.anyio
@pytest.mark.holdfast("harness")
async def test_harness(holdfast_clock):
    job = await send.enqueue("unknown")
    await holdfast_clock.run_until_idle()
    assert await job.state() == "dead"


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def nothing_sent():
    sent.clear()
"""


class Suite:
    """A folder of tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("shop.py", SHOP)
        self.write("pytest.ini", SETTINGS)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "holdfast_pytest", "-p", "no:cacheprovider", *arguments]
        path = {"PYTHONPATH": f"{ROOT}:{self.folder}"}
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env={**path, **environment},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr

    def run_test(self, text: str, *arguments: str) -> tuple[int, str]:
        self.write("test_it.py", f"import pytest\nfrom shop import app, send, sent\n\n{text}")
        return self.run(*arguments)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_recipe_of_the_guide_passes_and_leaves_nothing_behind(tmp_path: Path, postgres: Postgres) -> None:
    modules = find_modules(PAGE.read_text(encoding="utf-8"))
    suite, url = Suite(tmp_path), postgres.url(postgres.create_database())
    assert [*modules] == ["shop.py", "conftest.py", "test_orders.py"]
    for name, text in modules.items():
        suite.write(name, text)
    code, shown = suite.run(DATABASE_URL=url)
    assert (code, "23 passed" in shown) == (0, True), shown
    with psycopg.connect(url) as connection:
        left = "select tablename from pg_tables where schemaname not in ('pg_catalog', 'information_schema')"
        assert connection.execute(left).fetchall() == []
        schemas = connection.execute("select nspname from pg_namespace where nspname like 'holdfast%'")
        assert schemas.fetchall() == []


def test_plugin_is_registered_and_imports_nothing_of_holdfast(suite: Suite) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"holdfast_pytest": "holdfast_pytest"}
    suite.write("test_it.py", "import sys\n\n\ndef test_other():\n    assert 'holdfast' not in sys.modules\n")
    code, shown = suite.run()
    assert (code, "1 passed" in shown) == (0, True), shown


def test_every_fixture_has_the_prefix(suite: Suite) -> None:
    suite.write("test_it.py", "")
    _, shown = suite.run("--fixtures", "-v")
    (ours,) = re.findall(r"fixtures defined from holdfast_pytest -+\n(.*?)\n\n\n", shown + "\n\n\n", re.DOTALL)
    names = re.findall(r"^(\w+)(?: \[.*)? -- ", ours, re.MULTILINE)
    assert sorted(names) == ["holdfast_app", "holdfast_clock", "holdfast_jobs", "holdfast_store", "holdfast_url"]


def test_modes_without_a_database(suite: Suite) -> None:
    code, shown = suite.run_test(MODES)
    assert (code, "6 passed" in shown) == (0, True), shown
    assert sorted(path.name for path in suite.folder.iterdir() if path.is_file()) == [
        "pytest.ini",
        "shop.py",
        "test_it.py",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "@pytest.mark.holdfast('eager')\ndef test_it(): ...",
            "holdfast: 'eager' is no mode; give one of these: manual",
        ),
        ("@pytest.mark.holdfast(mode='inline')\ndef test_it(): ...", "is no mode"),
        ("def test_it(holdfast_clock): ...", "holdfast_clock: test_it is not async; a harness needs an event loop"),
        (
            "@pytest.mark.holdfast('inline')\nasync def test_it(holdfast_clock): ...",
            "holdfast_clock: only a harness has a clock",
        ),
    ],
)
def test_mistakes_are_explained(suite: Suite, text: str, message: str) -> None:
    code, shown = suite.run_test(text)
    assert (code, message in shown) == (1, True), shown


def test_mode_is_entered_ahead_of_other_fixtures(suite: Suite) -> None:
    code, shown = suite.run_test("""
@pytest.fixture
def started():
    assert app.under_test
    yield
    assert app.under_test


def test_argument(started, holdfast_jobs): ...


@pytest.mark.holdfast("inline")
@pytest.mark.parametrize("number", [1, 2])
def test_marker(started, number): ...


def test_other():
    assert not app.under_test
""")
    assert (code, "4 passed" in shown) == (0, True), shown


def test_fixture_for_all_tests_enters_manual_mode(suite: Suite) -> None:
    suite.write("conftest.py", "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef in_a_mode(holdfast_jobs): ...\n")
    code, shown = suite.run_test("""
def test_plain():
    send.sync.enqueue("ann")
    assert (app.under_test, "ann" in sent) == (True, False)


@pytest.mark.holdfast("inline")
def test_marked():
    send.sync.enqueue("bob")
    assert sent[-1:] == ["bob"]
""")
    assert (code, "2 passed" in shown) == (0, True), shown


def test_missing_application_is_explained(suite: Suite) -> None:
    suite.write("pytest.ini", "[pytest]\n")
    code, shown = suite.run_test("def test_it(holdfast_jobs): ...")
    assert (code, "define a fixture of this name that returns it, or add" in shown) == (1, True), shown
    suite.write("pytest.ini", "[pytest]\nholdfast_app = shop:ap\n")
    code, shown = suite.run()
    assert (code, "shop has no ap; did you mean app?" in shown) == (1, True), shown


AROUND = """
@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def async_seed(anyio_backend):
    await send.enqueue("async seed")


@pytest.fixture
def seed():
    send.sync.enqueue("seed")
    yield
    send.sync.enqueue("late")
    assert [job.state for job in app.sync.find().jobs] == ["queued", "succeeded", "succeeded"]


@pytest.mark.anyio
@pytest.mark.parametrize("number", [1, 2])
async def test_it(seed, async_seed, holdfast_clock, number):
    await holdfast_clock.run_until_idle()
    assert sorted(sent) == ["async seed", "seed"]
    sent.clear()


def test_others_are_in_no_mode():
    assert not app.under_test
"""


@pytest.mark.parametrize("place", ["a private file", "postgres"])
def test_jobs_of_fixtures_are_in_the_store_of_the_harness(suite: Suite, postgres: Postgres, place: str) -> None:
    if place == "postgres":
        url = postgres.url(postgres.create_database())
        overridden = f"@pytest.fixture(scope='session')\ndef holdfast_url():\n    return {url!r}\n"
        suite.write("conftest.py", f"import pytest\n\n\n{overridden}")
    code, shown = suite.run_test(AROUND)
    assert (code, "3 passed" in shown) == (0, True), shown
    assert not (suite.folder / "real.db").exists()


def test_harness_is_made_anew_for_a_rerun(suite: Suite) -> None:
    """As pytest-rerunfailures does it: the protocol of the same item, twice."""
    suite.write(
        "conftest.py",
        "from _pytest.runner import runtestprotocol\n\n\n"
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    runtestprotocol(item, nextitem=nextitem, log=False)\n"
        "    item._initrequest()\n",
    )
    code, shown = suite.run_test("""
@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_it(holdfast_clock):
    job = await send.enqueue("ann")
    await holdfast_clock.run_until_idle()
    assert (await app.count(), await job.state()) == (1, "succeeded")
""")
    assert (code, "1 passed" in shown) == (0, True), shown


def test_mark_on_one_parameter_leaves_the_others(suite: Suite) -> None:
    code, shown = suite.run_test("""
@pytest.mark.parametrize("mode", [None, pytest.param("inline", marks=pytest.mark.holdfast("inline"))])
def test_it(mode):
    assert (app.under_test, app.is_inline) == (mode == "inline", mode == "inline")
""")
    assert (code, "2 passed" in shown) == (0, True), shown


def test_hypothesis_runs_each_example_in_the_harness(suite: Suite) -> None:
    code, shown = suite.run_test("""
from hypothesis import HealthCheck, given, settings, strategies


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
@settings(max_examples=3, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(to=strategies.sampled_from("abc"))
async def test_it(holdfast_clock, to):
    await send.enqueue(to)
    await holdfast_clock.run_until_idle()
    assert sent[-1] == to
""")
    assert (code, "1 passed" in shown) == (0, True), shown
