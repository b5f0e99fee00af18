"""Pages of batches: progress, jobs by state, callbacks, and the changes made there."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.stores.common import searches
from holdfast.web import jobs
from holdfast.web.console import batch_pages
from tests.console.visitor import Visitor
from tests.console.world import World
from tests.web.client import Api
from tests.web.keyed import Keys


def _states(api: Api, batch: str) -> dict[str, int]:
    found = api.get(f"/v1/jobs/{batch}/waits")["dependencies"]
    states = [api.get(f"/v1/jobs/{each['job_id']}")["state"] for each in found]
    return {state: states.count(state) for state in states}


def test_list_shows_the_progress_of_each_batch(visitor: Visitor, world: World) -> None:
    page = visitor.open_page("/batches")
    assert (f"/console/batches/{world.batch}" in page, "2 of 3 ended, 1 dead or cancelled" in page) == (True, True)
    assert '<rect class="succeeded" x="0.0" y="0" width="33.33"' in page
    assert '<rect class="dead" x="33.33" y="0" width="33.33"' in page
    assert world.batch in visitor.open_page("/batches?tag=spring&state=waiting&queue=bulk")
    for other in ("tag=autumn", "state=succeeded", "queue=mail"):
        assert "No batch matches" in visitor.open_page(f"/batches?{other}")


def test_list_is_paged_by_cursor(open_api: Api, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_pages, "_BATCHES_ON_PAGE", 2)
    job = {"task": "work", "payload": {}}
    ids = [open_api.post("/v1/batches", {"jobs": [job]}, 201)["id"] for _ in range(3)]
    first = visitor.open_page("/batches")
    [older] = re.findall(r'href="/console(/batches\?[^"]*cursor=[^"]*)" rel="next"', first)
    second = visitor.open_page(older.replace("&amp;", "&"))
    shown = [re.findall(r'id="batch-([0-9a-f-]{36})"', page) for page in (first, second)]
    assert [*shown[0], *shown[1]] == ids[::-1]


def test_list_that_ends_in_time_says_that_it_goes_on(
    open_api: Api, visitor: Visitor, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searches, "FIRST_PART", 1)
    monkeypatch.setattr(jobs, "_SEARCH_FOR", 0.0)
    open_api.submit()
    page = visitor.open_page("/batches")
    assert ("None of the jobs looked at so far is such a batch." in page, "Older batches" in page) == (True, True)


def test_page_has_jobs_by_state_and_callbacks(open_api: Api, visitor: Visitor, world: World) -> None:
    page = visitor.open_page(f"/batches/{world.batch}")
    for member in open_api.get(f"/v1/jobs/{world.batch}/waits")["dependencies"]:
        assert f'id="member-{member["job_id"]}"' in page
    assert re.search(r"</a> on success <span class=\"state waiting\" ", page)
    assert re.search(r"<dt>Dead or cancelled</dt><dd>1</dd>", page)
    cancelled = visitor.open_page(f"/batches/{world.batch}?state=cancelled")
    assert len(re.findall('id="member-', cancelled)) == 1
    assert 'aria-current="true">cancelled' in cancelled


def test_notice_claims_only_what_was_changed(open_api: Api, visitor: Visitor, world: World) -> None:
    place = f"/batches/{world.batch}"
    assert visitor.act(f"{place}/replay-jobs") == f"{place}?notice=members_replayed"
    assert visitor.act(f"{place}/replay-jobs") == f"{place}?notice=members_kept"
    assert "No job of the batch was changed" in visitor.open_page(visitor.landed)


def test_notice_says_that_some_jobs_were_refused(open_api: Api, visitor: Visitor) -> None:
    unique = {"task": "work", "payload": {"to": "one"}, "unique": {"during": "active"}}
    jobs = [{"task": "work", "payload": {}}, unique]
    batch = open_api.post("/v1/batches", {"jobs": jobs}, 201)["id"]
    visitor.act(f"/batches/{batch}/cancel-jobs")
    open_api.post("/v1/jobs", unique, 201)
    assert visitor.act(f"/batches/{batch}/replay-jobs") == f"/batches/{batch}?notice=members_refused"
    assert "Some jobs of the batch were changed" in visitor.open_page(visitor.landed)


def test_page_of_a_job_leads_to_its_batch(open_api: Api, visitor: Visitor, world: World) -> None:
    member = open_api.get(f"/v1/jobs/{world.batch}/waits")["dependencies"][0]["job_id"]
    for job in (member, world.batch):
        assert f'href="/console/batches/{world.batch}"' in visitor.open_page(f"/jobs/{job}")


def test_job_that_is_no_batch_has_no_page_there(visitor: Visitor, world: World) -> None:
    assert "no such batch" in visitor.open_page(f"/batches/{world.dead}", 404)
    assert "no such batch" in visitor.send(f"/batches/{world.queued}/cancel").text


def test_batch_is_cancelled_and_its_jobs_go_on(open_api: Api, visitor: Visitor, world: World) -> None:
    assert visitor.act(f"/batches/{world.batch}/cancel") == f"/batches/{world.batch}?notice=batch_cancelled"
    assert open_api.get(f"/v1/jobs/{world.batch}")["state"] == "cancelled"
    assert _states(open_api, world.batch) == {"succeeded": 1, "cancelled": 1, "queued": 1}


def test_jobs_of_a_batch_are_cancelled(open_api: Api, visitor: Visitor, world: World) -> None:
    visitor.act(f"/batches/{world.batch}/cancel-jobs")
    assert _states(open_api, world.batch) == {"succeeded": 1, "cancelled": 2}
    assert open_api.get(f"/v1/jobs/{world.batch}")["state"] == "dead"


def test_failed_jobs_of_a_batch_are_replayed(open_api: Api, visitor: Visitor, world: World) -> None:
    visitor.act(f"/batches/{world.batch}/replay-jobs")
    assert _states(open_api, world.batch) == {"succeeded": 1, "queued": 2}
    assert open_api.get(f"/v1/batches/{world.batch}")["failed"] == 0


def test_jobs_of_foreign_queues_are_neither_shown_nor_changed(open_api: Api, keys: Keys) -> None:
    jobs: list[Any] = [{"task": "work", "payload": {}, "queue": queue} for queue in ("own", "vault")]
    batch = open_api.post("/v1/batches", {"jobs": jobs}, 201)
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", "operate", queues=("own",)))
    assert f'id="batch-{batch["id"]}"' in visitor.open_page("/batches")
    page = visitor.open_page(f"/batches/{batch['id']}")
    assert (batch["jobs"][0] in page, batch["jobs"][1] in page, "vault" in page) == (True, False, False)
    visitor.act(f"/batches/{batch['id']}/cancel-jobs")
    assert [open_api.get(f"/v1/jobs/{each}")["state"] for each in batch["jobs"]] == ["cancelled", "queued"]


def test_key_without_a_job_sees_an_empty_list(open_api: Api, keys: Keys, world: World) -> None:
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", queues=("own",)))
    assert "There are no batches yet." in visitor.open_page("/batches")
    missing = visitor.open_page("/batches/0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77", 404)
    foreign = visitor.open_page(f"/batches/{world.batch}", 404)
    detail = re.compile(r"<p>(.*?)</p>")
    assert detail.findall(missing) == detail.findall(foreign)


def test_jobs_of_a_very_large_batch_are_not_listed(
    visitor: Visitor, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_pages, "_READ_BELOW", 2)
    page = visitor.open_page(f"/batches/{world.batch}")
    assert ("too many jobs to list" in page, 'id="member-' in page, "Cancel jobs" in page) == (True, False, False)


def test_page_says_that_only_the_first_jobs_are_counted(
    visitor: Visitor, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the first 1,000 by id are counted"
    assert text not in visitor.open_page(f"/batches/{world.batch}")
    monkeypatch.setattr(batch_pages, "MAX_SHOWN", 2)
    assert text in visitor.open_page(f"/batches/{world.batch}")


def test_rows_are_bounded_and_failed_jobs_come_first(
    open_api: Api, visitor: Visitor, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_pages, "_MAX_ROWS", 1)
    page = visitor.open_page(f"/batches/{world.batch}")
    [shown] = re.findall('id="member-([0-9a-f-]{36})"', page)
    assert open_api.get(f"/v1/jobs/{shown}")["state"] == "cancelled"
    assert "2 more are not shown." in page
