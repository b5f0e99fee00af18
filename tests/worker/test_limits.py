"""Limits, obeyed by whole workers in virtual time."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Context, Holdfast, JobFilter, JobState, Retry, RetryAfter
from holdfast.core.errors import ConfigError
from holdfast.core.events import DeclarationIgnored
from holdfast.core.models import Claim
from holdfast.stores.base import ClaimRequest
from holdfast.worker import Worker
from holdfast.worker.fetcher import Fetcher
from tests.support.load import TEST_SECONDS
from tests.unit import executor_tasks
from tests.worker.support import Recorder, gaps, harness, lose

MINUTE = 60


class Running:
    """Handlers that run at the same time: the most so far, in all and by key."""

    def __init__(self) -> None:
        self.now = Counter[str]()
        self.most = Counter[str]()
        self.order: list[str] = []

    def enter(self, key: str) -> None:
        self.order.append(key)
        self.now.update((key, "all"))
        self.most |= self.now

    def leave(self, key: str) -> None:
        self.now.subtract((key, "all"))


def sleeper(app: Holdfast, clock: Any, running: Running, seconds: float = 10) -> Any:
    """A task that takes virtual time."""

    @app.task("work")
    async def work(tenant: str) -> None:
        running.enter(tenant)
        try:
            await clock().sleep(seconds)
        finally:
            running.leave(tenant)

    return work


async def test_declared_limits_are_written_when_a_worker_starts(app: Holdfast) -> None:
    recorder = Recorder(app)

    @app.task("work")
    async def work(tenant: str) -> None: ...

    app.limit("kept", queue="default", concurrency=5)
    app.limit("operators", task="work", by="args.tenant")
    async with harness(app, schedule_owner="shop") as harnessed:
        await app.limits.add("operators", queue="mail", concurrency=1)
        (await harnessed.start()).worker.stop()
        await harnessed.advance(1)
        first = {limit.name: limit for limit in await app.limits.find_all()}
        await app.limits.change("kept", concurrency=50)
        app.declared_limits.clear()
        app.limit("kept", queue="default", concurrency=6)
        (await harnessed.start()).worker.stop()
        await harnessed.advance(1)
        second = await app.limits.get("kept")
        app.declared_limits.clear()
        (await harnessed.start()).worker.stop()
        await harnessed.advance(1)
        assert [limit.name for limit in await app.limits.find_all()] == ["operators"]
    assert (first["kept"].owner, first["operators"].owner) == ("shop", None)
    assert second.values.concurrency == 50
    assert second.declared is not None
    assert second.declared.concurrency == 6
    assert {event.declared for event in recorder.of(DeclarationIgnored)} == {"limit operators"}


async def test_limits_of_settings_are_written_and_followed(home: str, tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('[limits.mail]\nqueue = "mail"\nconcurrency = 5\n')
    app = Holdfast(home, path=file)
    app.limit("code", queue="default", concurrency=5)
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        written = {limit.name: (limit.owner, limit.values.concurrency) for limit in await app.limits.find_all()}
        assert written == {"code": ("code", 5), "mail": ("code", 5)}
        file.write_text('[limits.mail]\nqueue = "mail"\nconcurrency = 66\n')
        await harnessed.advance(20)
        assert (await app.limits.get("mail")).values.concurrency == 66


async def test_worker_refuses_a_declared_limit_of_an_argument_that_is_not_there(app: Holdfast) -> None:
    app.limit("crm", task="crm.sync", by="args.tennant", concurrency=1)  # of a task that is not known yet

    @app.task("crm.sync")
    async def sync(tenant: str) -> None: ...

    with pytest.raises(ConfigError, match=r"limit crm: by: 'args.tennant' .* did you mean tenant"):
        await Worker(app).run()
    assert await app.limits.find_all() == []


def test_limit_of_an_argument_that_is_not_there_is_refused_where_it_is_declared(app: Holdfast) -> None:
    @app.task("crm.sync")
    async def sync(tenant: str) -> None: ...

    with pytest.raises(ConfigError, match=r"limit crm: by: 'args.tennant' .* did you mean tenant"):
        app.limit("crm", task="crm.sync", by="args.tennant", concurrency=1)
    app.limit("crm", task="crm.sync", by="args.tenant", concurrency=1)


async def test_declared_limit_that_is_one_too_many_holds_up_no_other_declaration(app: Holdfast) -> None:
    recorder = Recorder(app)

    @app.task("work")
    async def work() -> None: ...

    for name in "abcdefghi":
        app.limit(name, queue="mail", concurrency=1)
    app.limit("other", queue="default", concurrency=1)
    app.schedule("hourly", work.new_job(), every="1h")
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        assert [limit.name for limit in await app.limits.find_all()] == [*"abcdefgh", "other"]
        assert [schedule.name for schedule in await app.schedules.find_all()] == ["hourly"]
    (ignored,) = recorder.of(DeclarationIgnored)
    assert ignored.declared == "limit i"
    assert "its queue or task has 8 limits" in ignored.problem


async def test_workers_together_run_as_many_jobs_as_allowed(app: Holdfast) -> None:
    running = Running()
    work = sleeper(app, lambda: harnessed.clock, running)
    app.limit("all", queue="default", concurrency=5)
    app.limit("tenant", task="work", by="args.tenant", concurrency=2)
    async with harness(app, concurrency=4) as harnessed:
        for _ in range(3):
            await harnessed.start()
        await harnessed.advance(1)
        for number in range(40):
            await work.enqueue("abcd"[number % 4])
        await harnessed.run_until_idle(limit=timedelta(hours=1))
        assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 40
    assert running.most["all"] == 5
    assert max(running.most[tenant] for tenant in "abcd") == 2


async def test_changed_limit_holds_for_all_workers(app: Holdfast) -> None:
    running = Running()
    work = sleeper(app, lambda: harnessed.clock, running)
    app.limit("all", queue="default", concurrency=1)
    async with harness(app, concurrency=4) as harnessed:
        await harnessed.start()
        await harnessed.start()
        await harnessed.advance(1)
        for _ in range(20):
            await work.enqueue("a")
        await harnessed.advance(25)
        assert running.most["all"] == 1
        await app.limits.change("all", concurrency=6)
        await harnessed.run_until_idle(limit=timedelta(hours=1))
    assert running.most["all"] == 6


async def test_rate_spaces_starts_of_all_workers(app: Holdfast) -> None:
    started: list[datetime] = []

    @app.task("work")
    async def work() -> None:
        started.append(harnessed.now)

    app.limit("slow", queue="default", rate="1/s", burst=2)
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.start()
        await harnessed.advance(1)
        for _ in range(8):
            await work.enqueue()
        await harnessed.run_until_idle(limit=timedelta(hours=1))
    assert len(started) == 8
    for begin in range(8):
        for end in range(begin, 8):
            assert end - begin + 1 <= 2 + (started[end] - started[begin]).total_seconds() + 1e-6
    assert (started[-1] - started[0]).total_seconds() < 8


async def test_single_job_waits_for_no_flood_of_another_key(app: Holdfast) -> None:
    running = Running()
    work = sleeper(app, lambda: harnessed.clock, running, seconds=1)
    app.limit("turns", queue="default", by="args.tenant")
    async with harness(app, concurrency=1) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        for _ in range(50):
            await work.enqueue("flood")
        await harnessed.advance(5.5)
        await work.enqueue("single")
        await harnessed.run_until_idle(limit=timedelta(hours=1))
    assert running.order.index("single") - 6 <= 2


@pytest.mark.parametrize("scope", ["queue", "task", "key"])
async def test_retry_after_with_a_scope_pauses_it_for_all(app: Holdfast, scope: Any) -> None:
    started: list[tuple[str, datetime]] = []

    @app.task("work")
    async def work(tenant: str) -> None:
        started.append((tenant, harnessed.now))
        if len(started) == 1:
            raise RetryAfter(300, scope=scope)

    app.limit("queue", queue="default", concurrency=10)
    app.limit("task", task="work", concurrency=10)
    app.limit("key", task="work", by="args.tenant")
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.start()
        await harnessed.advance(1)
        first = await work.enqueue("a")
        await harnessed.advance(1)
        failed = await first.job()
        await work.enqueue("a")
        await work.enqueue("b")
        await harnessed.advance(MINUTE)
        early = [tenant for tenant, _ in started[1:]]
        await harnessed.run_until_idle(limit=timedelta(hours=1))
    assert early == (["b"] if scope == "key" else [])
    assert f"paused: {'key=a' if scope == 'key' else scope}" in (failed.error or "")
    late = [at for _, at in started[1 + len(early) :]]
    assert len(late) == 3 - len(early)
    assert min(late) - started[0][1] >= timedelta(seconds=300)


async def test_retry_after_with_a_scope_without_a_limit_says_so(app: Holdfast) -> None:
    @app.task("work")
    async def work() -> None:
        raise RetryAfter(5, scope="task")

    async with harness(app, max_attempts=1) as harnessed:
        job = await work.enqueue()
        await harnessed.run_until_idle()
        assert "nothing was paused: no limit applies to its task" in ((await job.job()).error or "")


# ── tokens in handlers ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.rows("S59", "S60", "S61")
async def test_handlers_over_the_rate_fail_and_are_retried(app: Holdfast) -> None:
    calls: list[datetime] = []
    limited: dict[str, list[datetime]] = {}

    @app.task("call", retry=Retry.fixed(7), max_attempts=25)
    async def call_api(context: Context) -> None:
        limited.setdefault(context.id, []).append(harnessed.now)
        await context.limit("api")
        calls.append(harnessed.now)

    app.limit("api", rate="1/s", burst=3)
    async with harness(app, concurrency=8) as harnessed:
        for _ in range(3):
            await harnessed.start()
        await harnessed.advance(1)
        jobs = [await call_api.enqueue() for _ in range(12)]
        await harnessed.advance(1)
        errors = [(await job.job()).error for job in jobs]
        await harnessed.run_until_idle(limit=timedelta(hours=1))
        assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 12
    assert len(calls) == 12
    assert sum("rate limited: limit api" in (error or "") for error in errors) >= 8
    for begin in range(12):
        for end in range(begin, 12):
            assert end - begin + 1 <= 3 + (calls[end] - calls[begin]).total_seconds() + 1e-6
    assert all(gap == pytest.approx(7, abs=0.5) for tries in limited.values() for gap in gaps(tries))


@pytest.mark.rows("S62")
async def test_changed_rate_takes_effect_while_workers_run(app: Holdfast) -> None:
    calls: list[datetime] = []

    @app.task("call")
    async def call_api(context: Context) -> None:
        await context.limit("api", wait=True)
        calls.append(harnessed.now)

    app.limit("api", rate="1/m")
    async with harness(app, concurrency=30) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        for _ in range(20):
            await call_api.enqueue()
        await harnessed.advance(3 * MINUTE + 1)
        slow = len(calls)
        await app.limits.change("api", rate="10/s", burst=5)
        await harnessed.advance(2 * MINUTE)
        assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 20
    assert slow <= 5


async def test_handler_waits_for_tokens_and_keeps_its_runner(app: Holdfast) -> None:
    calls: list[datetime] = []

    @app.task("call")
    async def call_api(context: Context) -> None:
        await context.limit("api", 2, wait=True)
        calls.append(harnessed.now)

    app.limit("api", rate="1/s", burst=2)
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        for _ in range(4):
            await call_api.enqueue()
        await harnessed.run_until_idle(limit=timedelta(hours=1))
    assert all(gap >= 2 - 1e-6 for gap in gaps(calls))
    assert len(calls) == 4


async def test_unknown_limit_fails_with_a_remedy(app: Holdfast) -> None:
    @app.task("call")
    async def call_api(context: Context, name: str) -> None:
        await context.limit(name)

    app.limit("api", rate="1/s")
    app.limit("room", queue="default", concurrency=5)
    async with harness(app, max_attempts=1) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        misspelt, roomy = await call_api.enqueue("apo"), await call_api.enqueue("room")
        await harnessed.run_until_idle()
        assert "did you mean api" in ((await misspelt.job()).error or "")
        assert "declare another, with a rate alone" in ((await roomy.job()).error or "")


async def test_waiting_handler_notices_the_end_of_a_pause(app: Holdfast) -> None:
    @app.task("call")
    async def call_api(context: Context) -> None:
        await context.limit("api", wait=True)

    app.limit("api", rate="1/s")
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        await app.limits.pause("api", 3600)
        handle = await call_api.enqueue()
        await harnessed.advance(1)
        assert await handle.state() is JobState.RUNNING
        await app.limits.resume("api")
        await harnessed.advance(5)
        assert await handle.state() is JobState.SUCCEEDED


async def test_handler_in_a_thread_takes_tokens(app: Holdfast) -> None:
    @app.task("call", retry=Retry.fixed(60), executor="thread")
    def call_api(context: Context) -> str:
        context.sync.limit("api")
        return "called"

    app.limit("api", rate="1/m")
    async with harness(app, patience=10) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        first, second = await call_api.enqueue(), await call_api.enqueue()
        await harnessed.advance(1)
        errors = [(await job.job()).error for job in (first, second)]
        assert sorted(error is None for error in errors) == [False, True]
        assert "rate limited: limit api" in str(next(error for error in errors if error))
        await harnessed.run_until_idle(limit=timedelta(hours=1))
        assert {await job.result(timeout=0) for job in (first, second)} == {"called"}


async def test_cancelled_handler_in_a_thread_stops_waiting_for_tokens(app: Holdfast) -> None:
    entered = threading.Event()

    @app.task("call", executor="thread")
    def call_api(context: Context) -> None:
        context.sync.limit("api")
        entered.set()
        context.sync.limit("api", wait=True)

    app.limit("api", rate="1/h")
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        job = await call_api.enqueue()
        await harnessed.advance(0)
        await asyncio.to_thread(entered.wait, TEST_SECONDS)
        await app.cancel(job.id)
        await harnessed.run_until_idle()
        assert (await job.job()).state == "cancelled"


async def test_handler_in_a_process_gets_a_clear_error(app: Holdfast) -> None:
    app.registry.register(executor_tasks.limited)
    app.limit("api", rate="1/m")
    async with harness(app, concurrency=1, patience=10, max_attempts=1) as harnessed:
        job = await app.enqueue("limited")
        await harnessed.run_until_idle()
        assert 'executor="async" or "thread"' in ((await job.job()).error or "")


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_key_that_payloads_lack_counts_as_one_key(app: Holdfast) -> None:
    running = Running()

    @app.task("work")
    async def work(**arguments: Any) -> None:
        running.enter("all-of-them")
        await harnessed.clock.sleep(1)
        running.leave("all-of-them")

    app.limit("key", task="work", by="args.tenant", concurrency=1)
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        for number in range(5):
            await app.enqueue("work", {"other": number})
        await harnessed.run_until_idle(limit=timedelta(hours=1))
        assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 5
    assert running.most["all-of-them"] == 1


async def test_weight_above_the_limit_runs_alone(app: Holdfast) -> None:
    running = Running()

    @app.task("work")
    async def work(size: int) -> None:
        running.enter(str(size))
        await harnessed.clock.sleep(1)
        running.leave(str(size))

    app.limit("room", task="work", concurrency=3, weight="args.size")
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        for size in (1, 1, 100, 1, 2):
            await work.enqueue(size)
        await harnessed.advance(1.5)
        assert running.now["100"] == running.now["all"]
        await harnessed.run_until_idle(limit=timedelta(hours=1))
    assert running.order == ["1", "1", "100", "1", "2"]


async def test_limit_added_later_holds_for_jobs_that_wait(app: Holdfast) -> None:
    running = Running()
    work = sleeper(app, lambda: harnessed.clock, running)
    async with harness(app, concurrency=10) as harnessed:
        for number in range(12):
            await work.enqueue("ab"[number % 2])
        await app.limits.add("tenant", queue="default", by="args.tenant", concurrency=1)
        await harnessed.run_until_idle(limit=timedelta(hours=1))
        assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 12
    assert (running.most["a"], running.most["b"]) == (1, 1)


async def test_quarantined_job_without_room_empties_no_worker_again_and_again(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task("limited")
    async def limited() -> None: ...

    @app.task("plain")
    async def plain() -> None: ...

    async with harness(app, lease="1h", heartbeat="1m") as harnessed:
        quarantined = await limited.enqueue()
        for _ in range(2):
            await lose(app, quarantined, harnessed.clock)
        await app.limits.add("one", task="limited", concurrency=1)
        store = await app.open_store()
        holder = await limited.enqueue()
        request = ClaimRequest("holder", {"*": 1}, limit=1, lease_for=timedelta(hours=1))
        assert [job.id for job in (await store.queueing.claim(request)).jobs] == [holder.id]
        isolated, claim = 0, Fetcher._claim

        async def counted(fetcher: Fetcher, max_jobs: int, **options: bool) -> Claim:
            nonlocal isolated
            isolated += options.get("isolated", False)
            return await claim(fetcher, max_jobs, **options)

        monkeypatch.setattr(Fetcher, "_claim", counted)
        await harnessed.start()
        for _ in range(60):
            await plain.enqueue()
            await harnessed.advance(0.5)
        assert await quarantined.state() == "queued"
        assert await app.count(JobFilter(states=(JobState.SUCCEEDED,))) == 60
    assert 1 <= isolated <= 5
