"""The dashboard and the alerts of the queuectl example: in Chromium, with real workers that are killed."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.examples.queuectl_support import Dashboard, Queue, wait_until
from tests.support.browser import BrowserThread, Tab

BEAT = 3.0  # seconds, with a lock timeout of three of them
REFRESH = 3.0  # seconds between two updates of a page
SLACK = 10.0  # of a busy machine


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserThread]:
    browser = BrowserThread()
    yield browser
    browser.close()


@pytest.fixture
def dashboard(queue: Queue) -> Iterator[Dashboard]:
    dashboard = Dashboard(queue)
    yield dashboard
    dashboard.close()


@pytest.fixture
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    queue = Queue(tmp_path_factory.mktemp("dashboard"), lock_timeout=3 * BEAT)
    yield queue
    queue.app.sync.close()


def tiles(tab: Tab) -> dict[str, str]:
    """The numbers of the overview by their names."""
    found: dict[str, str] = tab.page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.tiles .tile')].map(each => "
        "[each.querySelector('dt').textContent, each.querySelector('dd').textContent.trim()]))"
    )
    return {name: found[name] for name in ("Queued", "Running", "Scheduled", "Failed", "Dead")}


def count_rows(queue: Queue) -> dict[str, str]:
    """The same, counted in the table of jobs."""
    names = {"queued": "Queued", "running": "Running", "scheduled": "Scheduled", "failed": "Failed", "dead": "Dead"}
    counted = dict.fromkeys(names.values(), 0)
    for job in queue.app.sync.find(limit=500).jobs:
        if job.state in names:
            counted[names[job.state]] += 1
    return {name: str(number) for name, number in counted.items()}


@pytest.mark.rows("Q76")
def test_dashboard_counts_match_the_database_within_two_seconds(
    queue: Queue, dashboard: Dashboard, browser: BrowserThread
) -> None:
    def follow(aside: ThreadPoolExecutor) -> None:
        with Tab(browser, dashboard.address) as tab, Tab(browser, dashboard.address) as open_tab:
            for each in (tab, open_tab):
                each.visit("")
                assert set(tiles(each).values()) == {"0"}
            aside.submit(submit_backlog).result()
            check_within_two_seconds(tab, {"Queued": "7", "Scheduled": "1"})
            with queue.workers(2):
                aside.submit(await_long_job).result()
                check_within_two_seconds(tab, {"Queued": "0", "Running": "1", "Dead": "1", "Scheduled": "1"})
                (queue.folder / "end").touch()
                aside.submit(queue.until, "long", "completed").result()
            check_within_two_seconds(tab, {"Running": "0", "Dead": "1"})
            shown = aside.submit(count_rows, queue).result()
            wait_until(lambda: tiles(open_tab) == shown, what="the page that stayed open")
            assert open_tab.problems == tab.problems == []

    def submit_backlog() -> None:
        later = {"command": "true", "run_at": "2099-01-01T00:00:00Z"}
        queue.enqueue(*({"command": "true"} for _ in range(7)), later)

    def await_long_job() -> None:
        queue.enqueue({"id": "dead", "command": "exit 1", "max_retries": 0})
        queue.until("dead", "dead")
        queue.enqueue({"id": "long", "command": "while ! test -e end; do sleep 0.1; done"})
        queue.until("long", "processing")
        wait_until(lambda: queue.states()["completed"] == 7, what="the short jobs")

    def check_within_two_seconds(tab: Tab, expected: dict[str, str]) -> None:
        until = time.monotonic() + 2
        shown = aside.submit(count_rows, queue).result()
        assert shown.items() >= expected.items()
        assert str(dashboard.client.get("/v1/stats").raise_for_status().json()["counts"]["queued"]) == shown["Queued"]
        tab.visit("")
        while tiles(tab) != shown:
            assert time.monotonic() < until, (tiles(tab), shown)
            tab.visit("")

    with ThreadPoolExecutor(1) as aside:  # an event loop runs in the thread of the browser
        browser.run(lambda: follow(aside))


@pytest.mark.rows("Q77")
def test_killed_worker_is_shown_as_lost_within_three_heartbeats(
    queue: Queue, dashboard: Dashboard, browser: BrowserThread
) -> None:
    def follow() -> None:
        with Tab(browser, dashboard.address) as tab:
            process = queue.start("worker", "run")
            try:
                (worker,) = wait_until(listed_workers, what="the worker")
                assert (worker["state"], worker["pid"]) == ("working", process.pid)
                tab.visit("/workers")
                row = tab.page.locator(f"[id='worker-{worker['id']}']")
                assert "working" in row.inner_text()
                assert row.locator("time").count() == 2, "start and last heartbeat"
                process.kill()
                process.wait(30)
                row.get_by_text("lost").wait_for()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait(30)
            (lost,) = listed_workers()
            assert lost["state"] == "lost"
            silent = datetime.now(UTC) - datetime.fromisoformat(lost["seen_at"])
            assert silent.total_seconds() < 3 * BEAT + REFRESH + SLACK
            assert tab.problems == []

    def listed_workers() -> list[dict[str, object]]:
        found: list[dict[str, object]] = dashboard.client.get("/v1/workers").raise_for_status().json()["workers"]
        return found

    browser.run(follow)


def test_long_lock_timeout_does_not_delay_the_news_of_a_lost_worker(tmp_path: Path) -> None:
    queue = Queue(tmp_path, lock_timeout=300)
    with queue.workers() as workers:
        workers.ready()
        with closing(sqlite3.connect(queue.place.database)) as connection:
            spans = connection.execute("select alive_until - seen_at from holdfast_worker").fetchall()
    assert spans == [(30_000_000,)]
    queue.app.sync.close()


@pytest.mark.rows("Q78")
def test_history_matches_the_jobs_that_ended(queue: Queue, dashboard: Dashboard, browser: BrowserThread) -> None:
    queue.enqueue(*({"command": "sleep 0.2"} for _ in range(5)), *({"command": "exit 1", "max_retries": 0},) * 2)
    with queue.workers(2):
        wait_until(lambda: queue.states()["completed"] == 5 and queue.states()["dead"] == 2, what="the ends")
    minutes = 60_000_000
    queue.edit("update holdfast_job set ended_at = ended_at - ?1, started_at = started_at - ?1", 20 * minutes)
    queue.edit(
        "update holdfast_job set ended_at = ended_at - ?1, started_at = started_at - ?1 "
        "where id in (select id from holdfast_job where state = 5 order by seq limit 2)",
        5 * minutes,
    )
    ended = [job for job in queue.app.sync.find(limit=100).jobs if job.ended_at_us is not None]
    expected: dict[int, dict[str, list[float]]] = {}
    for job in ended:
        assert job.ended_at_us is not None
        assert job.started_at_us is not None
        bucket = expected.setdefault(job.ended_at_us // minutes, {"succeeded": [], "dead": []})
        bucket[job.state].append((job.ended_at_us - job.started_at_us) / 1e6)
    assert len(expected) >= 2
    queue.count_history()
    points = dashboard.client.get("/v1/stats/history", params={"since": "1h"}).raise_for_status().json()["points"]
    shown = {
        int(datetime.fromisoformat(point["start"]).timestamp()) // 60: point
        for point in points
        if point["succeeded"] or point["dead"]
    }
    assert shown.keys() == expected.keys()
    for minute, lengths in expected.items():
        point = shown[minute]
        assert (point["succeeded"], point["dead"]) == (len(lengths["succeeded"]), len(lengths["dead"]))
        if lengths["succeeded"]:
            assert point["mean_seconds"] == pytest.approx(
                sum(lengths["succeeded"]) / len(lengths["succeeded"]), abs=1e-4
            )
            assert point["longest_seconds"] == pytest.approx(max(lengths["succeeded"]), abs=1e-4)

    def look() -> None:
        with Tab(browser, dashboard.address) as tab:
            tab.visit("")
            text = tab.page.locator("figcaption").inner_text()
            assert "5 succeeded" in text
            assert "2 dead" in text
            assert tab.page.locator(".chart rect.succeeded").count() == 2
            assert tab.problems == []

    browser.run(look)


@pytest.mark.rows("Q79")
def test_dead_jobs_beyond_the_threshold_are_one_alert(queue: Queue) -> None:
    alerts = queue.folder / "alerts"
    program = queue.folder / "page.py"
    program.write_text(f"import sys; open({str(alerts)!r}, 'a').write(sys.stdin.read() + chr(10))")
    assert queue.run("config", "set", "alert_dead", "1").returncode == 0
    assert queue.place.settings().alert_hold_off == timedelta(minutes=15)
    assert queue.run("config", "set", "alert_command", f"{sys.executable} {program}").returncode == 0
    assert "give a program" in queue.run("config", "set", "alert_command", "1").stderr
    with queue.workers(2):
        queue.enqueue({"id": "a", "command": "exit 1", "max_retries": 0})
        queue.until("a", "dead")
        assert queue.look_for_alerts() == [], "one is allowed"
        queue.enqueue({"id": "b", "command": "exit 1", "max_retries": 0})
        queue.until("b", "dead")
        wait_until(lambda: queue.lines("alerts"), what="the alert")
        wait_until(lambda: [each.is_sent for each in queue.active_alerts()] == [True], what="its record")
        assert queue.look_for_alerts() == []
        with closing(Dashboard(queue)) as dashboard:
            assert "alert dead since" in dashboard.client.get("/console").text
        assert queue.run("dlq", "retry", "a", "b").returncode == 0
        wait_until(lambda: queue.states()["dead"] == 2, what="their deaths")
    (message,) = [each for each in map(json.loads, queue.lines("alerts")) if each["state"] == "firing"]
    assert message["text"] == "queue default has 2 dead jobs, more than 1"
