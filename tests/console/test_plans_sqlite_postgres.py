"""Plans of the statements that pages execute: each has a case among the tests of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from starlette.routing import compile_path

from holdfast.stores.postgres import store as postgres_store
from holdfast.stores.sqlite import store as sqlite_store
from holdfast.web.console.site import ROUTES
from tests.conformance import plans_workflow, test_plans_postgres, test_plans_sqlite
from tests.console.visitor import Visitor
from tests.console.world import make_world
from tests.web.client import Api
from tests.web.keyed import Keys

PATHS = (
    "",
    "?span=7d",
    "/jobs",
    "/jobs?state=running",
    "/jobs?state=running&state=queued&queue=mail",
    "/jobs?state=dead&state=cancelled",
    "/jobs?tag=red",
    "/jobs?queue=mail&error=plain",
    "/jobs/{queued}",
    "/jobs/{dead}",
    "/jobs/{running}",
    "/jobs/{running}?lines=latest",
    "/jobs/key:key%20plain",
    "/jobs/{queued}/graph",
    "/jobs/{batch}/graph",
    "/errors",
    "/errors/{error}",
    "/bulk/preview?action=replay&state=dead",
    "/bulk/preview?action=cancel&queue=mail",
    "/bulk/result?action=cancel&queue=mail",
    "/queues",
    "/workers",
    "/schedules",
    "/schedules?after=a",
    "/schedules/nightly",
    "/schedules/nightly/backfill?start=2020-01-01&end=2020-01-03",
    "/limits",
    "/limits/crm",
    "/limits/keyed?value=x",
    "/batches",
    "/batches/{batch}",
    "/faults",
)
FEW = {"workers", "known_queues", "limits"}
"""Statements that read a table as a whole: a row for each worker, paused queue or limit."""
SEARCHES = {"find", "count"}
"""Searches by any filter, which may read all jobs: each has a time limit."""


class Recorder(dict[str, Any]):
    """Statements by name, and the names that were used."""

    def __init__(self, statements: Mapping[str, Any]) -> None:
        super().__init__(statements)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)


@pytest.fixture
def recorders(home: str, monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Recorders of all stores that are opened from now on."""
    found: list[Recorder] = []
    module, name = (
        (sqlite_store, "load_statements") if home.startswith("sqlite") else (postgres_store, "number_parameters")
    )
    load = getattr(module, name)

    def record(*given: Any) -> Recorder:
        found.append(Recorder(load(*given)))
        return found[-1]

    monkeypatch.setattr(module, name, record)
    return found


def test_every_statement_of_a_page_has_a_plan_case(home: str, keys: Keys, recorders: list[Recorder]) -> None:
    with Api(home, keys_file=str(keys.path)) as api:
        api._client.headers["x-api-key"] = keys.spare
        world = make_world(api)
        for recorder in recorders:
            recorder.used.clear()
        for key, statuses in (
            (keys.spare, {200, 303}),
            (keys.make("admin", queues=("mail", "later")), {200, 303, 403, 404}),
        ):
            visitor = Visitor(api)
            visitor.sign_in(key)
            for path in PATHS:
                page = path.format(**msgspec.structs.asdict(world))
                assert visitor.ask("GET", page).status_code in statuses, page
        used = {name for recorder in recorders for name in recorder.used}
    if home.startswith("sqlite"):
        cases = {*test_plans_sqlite.HOT}
    else:
        cases = {case.name for case in (*test_plans_postgres.CASES, *plans_workflow.CASES)}
    assert {"find", "find_ended", "overview", "history", "attempts", "logs"} <= used
    assert sorted(used - cases - FEW - SEARCHES) == []


def test_every_page_is_among_the_paths() -> None:
    for route in ROUTES:
        if route.method == "GET":
            pattern = compile_path(route.path)[0]
            assert any(pattern.match(f"/console{path.partition('?')[0]}") for path in PATHS), route.path
