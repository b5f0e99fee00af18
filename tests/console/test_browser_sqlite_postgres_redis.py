"""The console in Chromium, on every store: all pages, live updates, and an action with its effect."""

from __future__ import annotations

import pytest

from tests.console.scene import PAGES, Scene


@pytest.mark.rows("X11", "X12")
def test_every_page_opens_without_a_complaint(scene: Scene) -> None:
    with scene.open_tab() as tab:
        for page in PAGES:
            tab.visit(scene.path(page))
            assert tab.page.locator("main#main h1").count() == 1, page
        assert (tab.problems, tab.foreign_requests) == ([], [])


def test_page_follows_the_store_in_place(scene: Scene) -> None:
    with scene.open_tab() as tab:
        tab.visit(f"/jobs/{scene.world.dead}")
        page = tab.page
        page.locator("details.attempt summary").click()
        assert page.locator("details.attempt[open]").count() == 0
        page.evaluate("window.isSame = true")
        scene.client.post(f"/v1/jobs/{scene.world.dead}/replay").raise_for_status()
        page.locator("h1 .state.queued").wait_for()
        assert page.evaluate("window.isSame")
        assert page.locator("details.attempt[open]").count() == 0
        tab.visit("/jobs?tag=fresh")
        assert page.locator("tbody tr").count() == 0
        fresh = scene.client.post("/v1/jobs", json={"task": "work", "payload": {}, "tags": ["fresh"]}).json()
        page.locator(f"#job-{fresh['id']}").wait_for()
        assert tab.problems == []


def test_matching_jobs_are_replayed_after_one_question(scene: Scene) -> None:
    with scene.open_tab() as tab:
        tab.visit("/jobs")
        page = tab.page
        page.locator("label.chip", has_text="dead").click()
        page.get_by_role("button", name="Filter").click()
        page.get_by_role("link", name="Replay matching…").click()
        page.get_by_role("button", name="Replay 1 job").click()
        page.get_by_text("job is queued again").wait_for()
        assert scene.client.get(f"/v1/jobs/{scene.world.dead}").json()["state"] == "queued"
        assert tab.problems == []


def test_back_leads_through_a_change_of_many_jobs(scene: Scene) -> None:
    with scene.open_tab() as tab:
        tab.visit("/jobs?state=dead")
        page = tab.page
        page.get_by_role("link", name="Replay matching…").click()
        page.get_by_role("button", name="Replay 1 job").click()
        page.get_by_text("1 job is queued again").wait_for()
        assert tab.violations() == []
        page.get_by_role("link", name="See the queued jobs").click()
        page.locator(f"#job-{scene.world.dead}").wait_for()
        page.go_back()
        page.get_by_text("1 job is queued again").wait_for()
        page.go_back()
        page.get_by_text("No matching job can be queued again.").wait_for()
        page.go_back()
        page.wait_for_url("**/jobs?state=dead")
        page.get_by_text("No job matches these filters.").wait_for()
        assert tab.problems == []
