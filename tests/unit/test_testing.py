"""The testing kit, as an application's own tests use it."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast import (
    Context,
    Dead,
    Holdfast,
    HoldfastError,
    Invalid,
    JobFailed,
    JobState,
    ResultTimeout,
    Retry,
    Snooze,
    testing,
)
from holdfast.core.fault_points import POINTS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "testing.md"


@pytest.fixture
def app(tmp_path: Path) -> Holdfast:
    app = Holdfast(f"sqlite:///{tmp_path}/production.db")

    @app.task("add")
    async def add(a: int, b: int = 1) -> int:
        return a + b

    @app.task("add.thread")
    def add_thread(a: int) -> int:
        return a + 1

    @app.task("fail", retry=Retry.fixed(60), max_attempts=3)
    async def fail(how: str) -> None:
        raise {"value": ValueError("no"), "dead": Dead("for good"), "snooze": Snooze(60)}[how]

    @app.task("parent")
    async def parent() -> int:
        child = await app.enqueue("add", {"a": 40, "b": 2})
        return int(await child.result(timeout=0))

    return app


def test_a_harness_leaves_the_application_as_it_was(app: Holdfast, tmp_path: Path) -> None:
    before = dict(vars(app))

    async def run() -> None:
        async with testing.Harness(app, concurrency=1) as harness:
            assert app.settings.concurrency == 1
            await app.enqueue("add", {"a": 1})
            await harness.run_until_idle()

    asyncio.run(run())
    assert vars(app) == before
    assert list(tmp_path.iterdir()) == []


def test_advance_runs_what_falls_due_at_its_own_instant(app: Holdfast) -> None:
    runs: list[datetime] = []

    @app.task("tick")
    async def tick() -> None:
        runs.append(harness.now)

    harness = testing.Harness(app)

    async def run() -> None:
        async with harness:
            began = harness.now
            for minutes in (1, 2, 90):
                await app.enqueue("tick", delay=timedelta(minutes=minutes))
            await harness.advance(timedelta(hours=1))
            assert harness.now - began == timedelta(hours=1)
            assert [run - began for run in runs] == [timedelta(minutes=1), timedelta(minutes=2)]
            await harness.run_until_idle()
            assert harness.now - began == timedelta(minutes=90)

    asyncio.run(run())


def test_a_hopeless_handler_is_named(app: Holdfast) -> None:
    @app.task("waits")
    async def waits() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        async with testing.Harness(app, patience=0.01) as harness:
            await app.enqueue("waits")
            with pytest.raises(testing.NotIdle, match=r"waits .* running, attempt 1"):
                await harness.run_until_idle()

    asyncio.run(run())


def test_inline_runs_at_once_and_raises(app: Holdfast) -> None:
    async def run() -> None:
        with testing.inline(app):
            job = await app.enqueue("add", {"a": 1, "b": 2}, delay=60, queue="elsewhere")
            assert await job.result(timeout=0) == 3
            assert await (await app.enqueue("add.thread", {"a": 1})).result(timeout=0) == 2
            assert await (await app.enqueue("parent")).result(timeout=0) == 42
            with pytest.raises(ValueError, match="no"):
                await app.enqueue("fail", {"how": "value"})
            with pytest.raises(JobFailed, match="for good"):
                await app.enqueue("fail", {"how": "dead"})
            with pytest.raises(JobFailed, match="no task"):
                await app.enqueue("unknown")
            assert await (await app.enqueue("fail", {"how": "snooze"})).state() == "scheduled"
            await asyncio.gather(*[app.enqueue("add", {"a": number}) for number in range(5)])
            assert await app.count() == 13

    asyncio.run(run())


def test_inline_in_a_blocking_test(app: Holdfast) -> None:
    with testing.inline(app):
        assert app.sync.enqueue("add", {"a": 1}).sync.result(timeout=0) == 2
        assert app.sync.enqueue("parent").sync.result(timeout=0) == 42
        with pytest.raises(ValueError, match="no"):
            app.sync.enqueue("fail", {"how": "value"})


def test_inline_does_not_wait_for_what_nothing_runs_on(app: Holdfast) -> None:
    @app.task("later")
    async def later(context: Context) -> None:
        await context.sleep("1h")

    with testing.inline(app), pytest.raises(ResultTimeout, match=r"; in inline mode .* testing\.Harness"):
        later.sync.enqueue().sync.result()


def test_inline_runs_the_jobs_of_a_batch_and_then_its_callbacks(app: Holdfast) -> None:
    done: list[str] = []

    @app.task("member")
    async def member(name: str) -> None:
        done.append(name)
        if name == "bad":
            raise ValueError("bad")

    @app.task("callback")
    async def callback(name: str) -> None:
        done.append(name)

    async def run() -> None:
        with testing.inline(app):
            good = [member.new_job(name) for name in ("a", "b")]
            batch = await app.enqueue_batch(good, on_success=callback.new_job("ok"), on_end=callback.new_job("end"))
            assert sorted(done) == ["a", "b", "end", "ok"]
            assert await batch.state() is JobState.SUCCEEDED
            with pytest.raises(ValueError, match="bad"):
                await app.enqueue_batch(
                    [member.options(max_attempts=1).new_job("bad")], on_end=callback.new_job("late")
                )
            assert done[-2:] == ["bad", "late"]

    asyncio.run(run())


def test_inline_keeps_keys(app: Holdfast) -> None:
    with testing.inline(app):
        first = app.sync.enqueue("add", {"a": 1}, key="k")
        second = app.sync.enqueue("add", {"a": 5}, key="k")
        assert (first.id, second.created) == (second.id, False)
        assert second.sync.result(timeout=0) == 2


def test_manual_only_stores(app: Holdfast) -> None:
    with testing.manual(app):
        job = app.sync.enqueue("add", {"a": 1, "b": 2}, delay=3600, key="k", priority=3, tags=["t"], queue="q")
        assert job.sync.state() == "scheduled"
        whole = {
            "task": "add",
            "args": {"a": 1, "b": 2},
            "delay": 3600,
            "key": "k",
            "priority": 3,
            "tag": "t",
            "queue": "q",
        }
        (found,) = testing.assert_enqueued(app, **whole)
        assert found.id == job.id
        for name, other in {
            "task": "ad",
            "args": {"a": 2},
            "delay": 60,
            "key": "x",
            "priority": 0,
            "tag": "",
            "queue": "d",
        }.items():
            testing.assert_enqueued(app, **{name: whole[name]})
            testing.refute_enqueued(app, **{name: other})


def test_arguments_are_compared_in_part(app: Holdfast) -> None:
    with testing.manual(app):
        app.sync.enqueue("any", {"user": {"id": 7, "name": "Ann"}, "flag": True, "list": [1, 2]})
        for part in ({}, {"user": {"id": 7}}, {"flag": True}, {"list": [1, 2]}):
            testing.assert_enqueued(app, args=part)
        for part in ({"user": {"id": 8}}, {"user": 7}, {"flag": 1}, {"list": [1]}, {"other": None}):
            testing.refute_enqueued(app, args=part)


def test_failures_show_what_was_enqueued(app: Holdfast) -> None:
    with testing.manual(app):
        with pytest.raises(AssertionError, match=r"Nothing was enqueued\."):
            testing.assert_enqueued(app, task="add")
        app.sync.enqueue("add", {"a": 1}, delay=60, key="k")
        with pytest.raises(AssertionError) as missing:
            testing.assert_enqueued(app, task="send", args={"a": 1})
        with pytest.raises(AssertionError, match="expected 2 jobs with task='add', found 1"):
            testing.assert_enqueued(app, task="add", count=2)
        with pytest.raises(AssertionError, match="expected no job with task='add', found 1"):
            testing.refute_enqueued(app, task="add")
    assert "expected a job with task='send', args={'a': 1}, found 0." in str(missing.value)
    assert "add {\"a\":1} queue=default key='k' delay=0:01:00 (scheduled)" in str(missing.value)


def test_waiting_for_a_result_in_frozen_time_is_explained(app: Holdfast) -> None:
    async def run() -> None:
        async with testing.Harness(app, patience=0.1) as harness:
            job = await app.enqueue("fail", {"how": "value"})
            for timeout in (0.01, 1, None):
                with pytest.raises(HoldfastError, match=r"await harness\.run_until_idle\(\)"):
                    await job.result(timeout=timeout)
            await harness.advance(1)  # it has failed once, and is not retried before time moves
            with pytest.raises(HoldfastError, match="time stands still"):
                await job.result(timeout=3600)
            with pytest.raises(ResultTimeout):
                await asyncio.gather(job.result(timeout=30), harness.advance(40))

    asyncio.run(run())


def test_a_result_that_needs_no_time_can_be_waited_for(app: Holdfast) -> None:
    async def run() -> None:
        async with testing.Harness(app, patience=20) as harness:
            await harness.start()
            quick = await app.enqueue("add", {"a": 1})
            assert await quick.result(timeout=60) == 2
            late = await app.enqueue("add", {"a": 2}, delay=60)
            results = await asyncio.gather(late.result(timeout=90), harness.run_until_idle())
            assert results[0] == 3

    asyncio.run(run())


def test_time_of_a_harness_begins_at_the_present_or_at_a_given_start(app: Holdfast) -> None:
    start = datetime(2030, 3, 31, tzinfo=UTC)

    async def run() -> None:
        async with testing.Harness(app) as harness:
            in_an_hour = datetime.now(UTC) + timedelta(hours=1)
            later = await app.enqueue("add", {"a": 1}, run_at=in_an_hour)
            valid = await app.enqueue("add", {"a": 2}, expires=in_an_hour)
            await harness.advance(1)
            assert (await later.state(), await valid.state()) == ("scheduled", "succeeded")
        async with testing.Harness(app, start=start) as harness:
            assert harness.now == start

    asyncio.run(run())
    with pytest.raises(Invalid, match="start"):
        testing.Harness(app, start=datetime(2030, 3, 31))  # noqa: DTZ001 - it names no instant


def test_paused_schedules_are_left_out_of_a_harness(app: Holdfast) -> None:
    app.schedule("often", app.draft_job("add", {"a": 1}), every=5)

    async def run() -> None:
        async with testing.Harness(app) as harness:
            await harness.start()
            await app.schedules.pause("often")
            late = await app.enqueue("add", {"a": 1}, delay="23h")
            await harness.advance("1d")
            assert [job.id for job in (await app.find()).jobs] == [late.id]
            assert await late.result(timeout=0) == 2

    asyncio.run(run())


def test_a_harness_that_was_not_entered_says_so(app: Holdfast) -> None:
    harness = testing.Harness(app)

    async def run() -> None:
        for call in (harness.run_until_idle(), harness.advance(1), harness.start()):
            with pytest.raises(HoldfastError, match="enter it first: async with"):
                await call

    asyncio.run(run())


def test_real_store_is_not_opened_outside_a_test_mode(app: Holdfast, tmp_path: Path) -> None:
    for ask in (testing.enqueued, testing.assert_enqueued, testing.refute_enqueued):
        with pytest.raises(HoldfastError, match=r"testing\.manual\(app\)"):
            ask(app)
    assert list(tmp_path.iterdir()) == []


def test_the_examples_of_the_guide(tmp_path: Path) -> None:
    """Each Python block of docs/testing.md is a test module of its own, run by a pytest of its own."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    (tmp_path / "shop.py").write_text(blocks[0])
    (tmp_path / "conftest.py").write_text(blocks[1])
    for number, block in enumerate(blocks[2:]):
        (tmp_path / f"test_example_{number}.py").write_text(block)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{DOCUMENT.parents[1]}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(re.findall('^def test_|^async def test_', ''.join(blocks), re.MULTILINE))} passed" in ran.stdout


def test_the_guide_kills_a_worker_at_a_point(tmp_path: Path) -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    (command,) = re.findall(r"```sh\n(.*?)  # exits 137\n```", page)
    (tmp_path / "shop.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    app = Holdfast(f"sqlite:///{tmp_path}/shop.db")
    app.sync.enqueue_many([app.draft_job("email.send", {"to": f"{number}@example.com"}) for number in range(300)])
    app.sync.close()
    ran = subprocess.run(
        ["bash", "-c", command.replace("holdfast", f"{sys.executable} -m holdfast")],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{DOCUMENT.parents[1]}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert ran.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), ran.stdout + ran.stderr


def test_the_guide_names_every_point() -> None:
    (listed,) = re.findall(r"The\spoints are (.*?)\. Unset", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", listed)) == POINTS


@pytest.mark.parametrize("change", ["signal", "edit", "cancel", "delete", "resume a limit"])
def test_workers_know_of_a_change_that_makes_jobs_ready_before_time_moves(app: Holdfast, change: str) -> None:
    @app.task("approval")
    async def approval(context: Context) -> None:
        await context.wait_for("approved", timeout="7d")

    async def run() -> int:
        async with testing.Harness(app) as harness:
            waiting = await app.enqueue("approval", {})
            delayed = await app.enqueue("add", {"a": 1}, delay="1d")
            await app.limits.add("slow", rate="1/d")
            await harness.advance(1)
            notifications = harness._activity.notifications
            before = notifications.notified_count(frozenset({"queue"}))
            if change == "signal":
                assert (await app.signal("approved")).job_id == waiting.id
            elif change == "edit":
                await app.edit(delayed.id, delay=5)
            elif change == "cancel":
                await app.cancel(delayed.id)
            elif change == "delete":
                await app.delete(delayed.id)
            else:
                await app.limits.resume("slow")
            return notifications.notified_count(frozenset({"queue"})) - before

    assert asyncio.run(run()) > 0


def test_manual_runs_also_what_becomes_ready(app: Holdfast) -> None:
    done: list[int] = []

    @app.task("note")
    async def note(number: int) -> None:
        done.append(number)

    async def run() -> None:
        first = note.new_job(1)
        await app.enqueue_many([first, note.options(after=first).new_job(2)])
        await app.enqueue_batch([note.new_job(3)], on_success=note.new_job(4))
        await testing.run_enqueued(app)
        assert sorted(done) == [1, 2, 3, 4]

    with testing.manual(app):
        asyncio.run(run())


@pytest.mark.parametrize("kind", ["side", "bounded", "thread"])
def test_handler_that_waits_for_time_in_any_way_is_not_hopeless(app: Holdfast, kind: str) -> None:
    async def run() -> None:
        async with testing.Harness(app) as harness:

            async def slow() -> str:
                await harness.clock.sleep(60)
                return kind

            @app.task("side")
            async def side(context: Context) -> list[str]:
                return list(await asyncio.gather(context.step("a", slow), context.step("b", slow)))

            @app.task("bounded")
            async def bounded(context: Context) -> str:
                return str(await context.with_options(timeout=120).step("s", slow))

            @app.task("thread")
            def thread(context: Context) -> str:
                for _ in range(2):
                    context.sync.limit("api", wait=True)
                return kind

            await app.limits.add("api", rate="1/m")
            before = harness.now
            job = await app.enqueue(kind, {})
            await harness.run_until_idle()
            assert await job.state() is JobState.SUCCEEDED
            assert harness.now - before >= timedelta(seconds=59)

    asyncio.run(run())
