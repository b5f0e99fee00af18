"""The console in Chromium: WCAG 2.2 AA in both themes, a phone, the keyboard, and questions before changes."""

from __future__ import annotations

import pytest
from playwright.sync_api import Route

from tests.console.scene import PAGES, Scene
from tests.support.browser import Tab


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)], ids=["wide", "phone"])
@pytest.mark.rows("X11", "X12")
def test_every_page_is_accessible_and_complains_of_nothing(scene: Scene, width: int, dark: bool) -> None:
    with scene.open_tab(width=width, dark=dark) as tab:
        for page in PAGES:
            tab.visit(scene.path(page))
            assert tab.page.locator("main#main h1").count() == 1, page
            tab.page.evaluate("document.querySelectorAll('details.change').forEach(each => { each.open = true; })")
            assert tab.violations() == [], page
            assert not tab.has_horizontal_scroll(), page
        assert (tab.problems, tab.foreign_requests) == ([], [])
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) is dark


def test_buttons_of_queues_are_whole_on_a_phone(scene: Scene) -> None:
    scene.client.post("/v1/queues/mail/pause").raise_for_status()
    with scene.open_tab(width=360) as tab:
        tab.visit("/queues")
        assert not _has_scroll(tab)
        grow = "document.querySelectorAll('td.num:not(:has(form))').forEach(each => { each.textContent = '100,000+'; })"
        tab.page.evaluate(grow)
        assert _has_scroll(tab)
        buttons = tab.page.locator(".table button").all()
        assert {each.inner_text().split()[0] for each in buttons} == {"Pause", "Resume"}
        for each in buttons:
            box = each.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] < 344
            each.click(trial=True)


def _has_scroll(tab: Tab) -> bool:
    """Returns True if the table is wider than its place."""
    wide: bool = tab.page.locator(".table").evaluate("each => each.scrollWidth > each.clientWidth")
    return wide


def test_paused_page_asks_for_nothing(scene: Scene) -> None:
    with scene.open_tab() as tab:
        page = tab.page
        page.clock.install()
        tab.visit("/queues")
        page.locator("#live-switch").click()
        assert page.locator("#live-switch[aria-pressed=false]").inner_text() == "Paused"
        scene.client.post("/v1/queues/mail/pause").raise_for_status()
        asked = len(tab.asked)
        page.clock.run_for(60_000)
        assert len(tab.asked) == asked
        page.clock.resume()
        page.locator("#live-switch").click()
        page.locator("#queue-mail .paused").wait_for()


def test_page_that_does_not_change_has_no_switch(scene: Scene) -> None:
    with scene.open_tab() as tab:
        tab.visit("/jobs?state=dead")
        assert tab.page.locator("#live-switch").is_visible()
        tab.page.get_by_role("link", name="Replay matching…").click()
        tab.page.locator(".lead").wait_for()
        assert not tab.page.locator("#live-switch").is_visible()
        assert tab.page.locator("nav a[aria-current]").inner_text() == "Jobs"
        assert tab.violations() == []


def test_dead_job_is_replayed_by_keyboard_alone(scene: Scene) -> None:
    with scene.open_tab() as tab:
        page = tab.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        _focus(tab, "1", ".tile.dead a")
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs?state=dead")
        _focus(tab, "work", "tbody a")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/jobs/{scene.world.dead}")
        _focus(tab, "Replay", "button")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.keyboard.press("Enter")
        page.locator(".notice").wait_for()
        assert scene.client.get(f"/v1/jobs/{scene.world.dead}").json()["state"] == "queued"


def _focus(tab: Tab, text: str, selector: str) -> None:
    """Presses Tab until an element has the focus."""
    for _ in range(80):
        tab.page.keyboard.press("Tab")
        matches = "selector => document.activeElement.matches(selector) && document.activeElement.innerText"
        found = tab.page.evaluate(matches, selector)
        if found and found.strip() == text:
            return
    raise AssertionError(f"no {selector} {text} was reached")


def test_question_is_asked_once_and_closed_by_escape(scene: Scene) -> None:
    with scene.open_tab() as tab:
        tab.visit(f"/jobs/{scene.world.dead}")
        page = tab.page
        page.get_by_text("Delete…").click()
        assert page.get_by_text("This cannot be undone.").is_visible()
        assert tab.violations() == []
        page.keyboard.press("Escape")
        assert not page.get_by_text("This cannot be undone.").is_visible()
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Delete", exact=True).click()
        page.wait_for_url("**/jobs")
        assert page.locator(".notice").inner_text() == "The job is deleted."
        assert scene.client.get(f"/v1/jobs/{scene.world.dead}").status_code == 404
        assert tab.problems == []


def test_change_of_thousands_leaves_one_place_in_the_history(scene: Scene) -> None:
    for _ in range(21):
        jobs = [{"task": "work", "payload": {}, "queue": "many"}] * 100
        scene.client.post("/v1/batches", json={"jobs": jobs}).raise_for_status()
    asked = 0
    held: list[Route] = []

    def interrupt(route: Route) -> None:
        """Cuts the second request, answers the third as a proxy whose server is away, and holds the fourth."""
        nonlocal asked
        asked += 1
        if asked == 2:
            route.abort()
        elif asked == 3:
            route.fulfill(status=502, content_type="text/html", body="<h1>Bad gateway</h1>")
        elif asked == 4:
            held.append(route)
        else:
            route.continue_()

    with scene.open_tab(width=360) as tab:
        page = tab.page
        page.route("**/console/bulk/run", interrupt)
        tab.visit("/jobs?queue=many&state=queued")
        page.get_by_role("link", name="Delete matching…").click()
        page.get_by_role("button", name="Delete 2,100 jobs").click()
        page.locator("#connection:not(:empty)").wait_for()
        assert "1,000 jobs are deleted. More are left." in page.locator("main").inner_text()
        page.evaluate("document.getElementById('connection').textContent = ''")
        page.get_by_role("button", name="Go on").click()
        page.locator("#connection:not(:empty)").wait_for()
        assert "1,000 jobs are deleted. More are left." in page.locator("main").inner_text()
        with page.expect_request("**/console/bulk/run"):
            page.get_by_role("button", name="Go on").click()
        page.get_by_role("button", name="Go on").click()
        held[0].continue_()
        page.get_by_text("2,100 jobs are deleted.").wait_for()
        assert (asked, tab.violations(), tab.has_horizontal_scroll()) == (5, [], False)
        page.go_back()
        page.get_by_text("No matching job can be deleted.").wait_for()


def test_backfill_counts_the_runs_and_asks(scene: Scene) -> None:
    with scene.open_tab(width=360) as tab:
        tab.visit("/schedules/nightly")
        page = tab.page
        page.get_by_text("Backfill…").click()
        page.get_by_label("From, in Europe/Zurich").fill("2020-01-01T00:00")
        page.get_by_label("To before").fill("2020-01-03T00:00")
        page.get_by_role("button", name="Count the runs").click()
        page.get_by_text("2 runs will be submitted.").wait_for()
        assert (tab.violations(), tab.has_horizontal_scroll()) == ([], False)
        page.get_by_role("button", name="Submit 2 jobs").click()
        page.locator(".notice").wait_for()
        page.go_back()
        page.get_by_text("All 2 runs have a job already.").wait_for()
        assert len(scene.client.get("/v1/jobs?tag=schedule:nightly").json()["jobs"]) == 2
        assert tab.problems == []


def test_revoked_session_leads_to_the_sign_in(scene: Scene) -> None:
    with scene.open_tab() as tab:
        tab.visit("/queues")
        tab.page.context.clear_cookies()
        tab.page.wait_for_url("**/sign-in?next=%2Fqueues")
        assert tab.violations() == []


def test_server_that_is_away_is_said_until_it_is_back(scene: Scene) -> None:
    with scene.open_tab() as tab:
        tab.visit("/queues")
        page = tab.page
        page.route("**/console/queues", lambda route: route.abort())
        page.locator("#connection:not(:empty)").wait_for()
        assert "does not answer" in page.locator("#connection").inner_text()
        assert page.locator("#queue-mail").is_visible()
        assert tab.violations() == []
        page.unroute("**/console/queues")
        page.locator("#connection").wait_for(state="hidden")
