"""Schedules, run by whole workers in virtual time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Conflict, Holdfast, Invalid, JobFilter, JobState, NotFound, Unavailable
from holdfast.core.events import DeclarationIgnored, ScheduleFired, StoreTrouble
from holdfast.core.schedule import ScheduleChange
from holdfast.testing import Harness
from holdfast.worker import ticker
from tests.worker.support import Recorder, harness

MINUTE = 60
HOUR = 3600


async def live_briefly(harnessed: Harness) -> None:
    """A worker that starts and stops: it reconciles the declared schedules."""
    (await harnessed.start()).worker.stop()
    await harnessed.advance(1)


async def count_jobs(app: Holdfast) -> int:
    return await app.count(JobFilter())


async def test_every_tick_makes_one_job_with_three_workers(app: Holdfast) -> None:
    started: list[datetime] = []

    @app.task("tick")
    async def tick(label: str) -> None:
        assert label == "all"
        started.append(harnessed.now)

    app.schedule("minutely", tick.new_job("all"), cron="* * * * *")
    async with harness(app) as harnessed:
        began = harnessed.now
        for _ in range(3):
            await harnessed.start()
        await harnessed.advance(10 * MINUTE)
        schedule = await app.schedules.get("minutely")
        assert await count_jobs(app) == 10
    assert started == [began + timedelta(minutes=n) for n in range(1, 11)]
    assert (schedule.runs, schedule.missed, schedule.skipped) == (10, 0, 0)


async def test_interval_counts_from_its_start_and_ends_after_its_runs(app: Holdfast) -> None:
    started: list[datetime] = []

    @app.task("tick")
    async def tick() -> None:
        started.append(harnessed.now)

    app.schedule("thrice", tick.new_job(), every="90s", max_runs=3)
    async with harness(app) as harnessed:
        began = harnessed.now
        await harnessed.start()
        await harnessed.advance(HOUR)
        ended = await app.schedules.get("thrice")
        assert await app.schedules.next_runs("thrice") == []
    assert started == [began + timedelta(seconds=90 * n) for n in (1, 2, 3)]
    assert ended.next_us is None


async def test_one_off_runs_once_at_its_instant(app: Holdfast) -> None:
    started: list[datetime] = []

    @app.task("tick")
    async def tick() -> None:
        started.append(harnessed.now)

    async with harness(app) as harnessed:
        at = harnessed.now + timedelta(minutes=7)
        await app.schedules.add("once", tick.new_job(), at=at)
        await harnessed.start()
        await harnessed.advance(HOUR)
    assert started == [at]


@pytest.mark.parametrize(("catch_up", "runs", "missed"), [(0, 0, 60), (1, 1, 59), (3, 3, 57)])
async def test_missed_ticks_follow_the_policy(app: Holdfast, catch_up: int, runs: int, missed: int) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        await app.schedules.add("hourly", tick.new_job(), cron="0 * * * *", catch_up=catch_up)
        harnessed.clock.advance(60.5 * HOUR)  # no worker lives
        fired = Recorder(app)
        await harnessed.start()
        await harnessed.advance(1)
        schedule = await app.schedules.get("hourly")
    assert (schedule.runs, schedule.missed) == (runs, missed)
    assert [len(event.job_ids) for event in fired.of(ScheduleFired)] == [runs]


async def test_overlap_policies_decide_about_a_tick_beside_its_predecessor(app: Holdfast) -> None:
    """Five ticks, and a first job that outlasts them all."""

    @app.task("slow")
    async def slow() -> None:
        await harnessed.clock.sleep(10 * MINUTE)

    states: dict[str, list[str]] = {}
    async with harness(app, concurrency=20) as harnessed:
        for overlap in ("allow", "skip", "queue_one", "cancel_previous"):
            await app.schedules.add(overlap.replace("_", "-"), slow.new_job(), every=60, overlap=overlap)
        await harnessed.start()
        await harnessed.advance(5 * MINUTE + 10)
        for overlap in ("allow", "skip", "queue_one", "cancel_previous"):
            page = await app.find(JobFilter(tag=f"schedule:{overlap.replace('_', '-')}"))
            states[overlap] = sorted(job.state for job in page.jobs)
        skipped = [(await app.schedules.get(name)).skipped for name in ("allow", "skip", "cancel-previous")]
        await app.cancel(JobFilter())
    assert states["allow"] == ["running"] * 5
    assert states["skip"] == ["running"]
    assert states["cancel_previous"] == ["cancelled"] * 4 + ["running"]
    assert states["queue_one"] == ["running"] * 5  # each runs when the next one comes
    assert skipped == [0, 4, 0]


@pytest.mark.parametrize("kept_out_by", ["skip", "unique"])
async def test_skipped_tick_does_not_use_up_a_run(app: Holdfast, kept_out_by: str) -> None:
    """The tick whose job would be the last one is kept out: the schedule goes on until its job has run."""

    @app.task("slow", unique="active" if kept_out_by == "unique" else None)
    async def slow() -> None:
        await harnessed.clock.sleep(150)

    overlap = "skip" if kept_out_by == "skip" else "allow"
    async with harness(app) as harnessed:
        await app.schedules.add("twice", slow.new_job(), every=60, overlap=overlap, max_runs=2)
        await harnessed.start()
        await harnessed.advance(2 * MINUTE + 10)
        early = await app.schedules.get("twice")
        await harnessed.advance(HOUR)
        ended = await app.schedules.get("twice")
        assert await count_jobs(app) == 2
    assert (early.runs, early.skipped, early.next_us is None) == (1, 1, False)
    assert (ended.runs, ended.skipped, ended.missed, ended.next_us) == (2, 2, 0, None)


async def test_queue_one_lets_a_single_job_wait(app: Holdfast) -> None:
    @app.task("slow")
    async def slow() -> None:
        await harnessed.clock.sleep(HOUR)

    async with harness(app, concurrency=1) as harnessed:
        await app.schedules.add("one", slow.new_job(), every=60, overlap="queue_one")
        await harnessed.start()
        await harnessed.advance(10 * MINUTE + 10)
        states = sorted(job.state for job in (await app.find()).jobs)
        assert (await app.schedules.get("one")).skipped == 8
        await app.cancel(JobFilter())
    assert states == ["queued", "running"]


async def test_pause_leaves_ticks_out_and_resume_goes_on_from_now(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        await app.schedules.add("minutely", tick.new_job(), cron="* * * * *")
        await harnessed.start()
        await harnessed.advance(2 * MINUTE + 1)
        await app.schedules.pause("minutely")
        assert await app.schedules.next_runs("minutely") == []
        await harnessed.advance(10 * MINUTE)
        assert await count_jobs(app) == 2
        resumed = await app.schedules.resume("minutely")
        await harnessed.advance(2 * MINUTE)
        assert await count_jobs(app) == 4
    assert resumed.missed == 0


async def test_jitter_delays_each_run_by_its_own_share_and_never_more(app: Holdfast) -> None:
    started: list[datetime] = []

    @app.task("tick")
    async def tick() -> None:
        started.append(harnessed.now)

    async with harness(app) as harnessed:
        began = harnessed.now
        await app.schedules.add("jittered", tick.new_job(), every=HOUR, jitter=MINUTE)
        await harnessed.start()
        await harnessed.advance(8 * HOUR + 2 * MINUTE)
    late = [(instant - began).total_seconds() % HOUR for instant in started]
    assert len(late) == 8
    assert all(0 <= each <= MINUTE for each in late)
    assert len(set(late)) > 1


async def test_run_and_backfill_make_jobs_beside_the_ticks(app: Holdfast) -> None:
    scheduled_for: list[str] = []

    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        schedule = await app.schedules.add("hourly", tick.new_job(), cron="0 * * * *")
        await app.schedules.pause("hourly")
        manual = await app.schedules.run("hourly")
        start = harnessed.now - timedelta(hours=5)
        handles = await app.schedules.backfill("hourly", start, harnessed.now)
        again = await app.schedules.backfill("hourly", start, harnessed.now)
        await harnessed.run_until_idle()
        assert await manual.state() == JobState.SUCCEEDED
        for handle in handles:
            job = await handle.job()
            scheduled_for.append((job.options_or_default.metadata or {})["scheduled_for"])
    assert [handle.created for handle in handles] == [True] * 5
    assert [handle.created for handle in again] == [False] * 5
    assert scheduled_for == [(start + timedelta(hours=n)).isoformat().replace("+00:00", "Z") for n in range(5)]
    assert schedule.runs == 0


async def test_dry_run_of_a_backfill_submits_nothing(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        await app.schedules.add("hourly", tick.new_job(), cron="0 * * * *")
        start = harnessed.now - timedelta(hours=5)
        done = await app.schedules.backfill("hourly", start, start + timedelta(hours=2))
        planned = await app.schedules.backfill("hourly", start, harnessed.now, dry_run=True)
        assert await app.count() == 2
        submitted = await app.schedules.backfill("hourly", start, harnessed.now)
    assert [handle.created for handle in planned] == [False] * 2 + [True] * 3
    assert [handle.id for handle in planned] == [handle.id for handle in submitted]
    assert [handle.id for handle in planned[:2]] == [handle.id for handle in done]


async def test_backfill_of_an_interval_reaches_before_its_start(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        await app.schedules.add("often", tick.new_job(), every=600)
        handles = await app.schedules.backfill("often", harnessed.now - timedelta(hours=1), harnessed.now)
    assert len(handles) == 6


async def test_code_adds_changes_and_removes_only_its_own(app: Holdfast) -> None:
    @app.task("tick")
    async def tick(label: str) -> None: ...

    recorder = Recorder(app)
    app.schedule("kept", tick.new_job("a"), cron="0 * * * *")
    app.schedule("dropped", tick.new_job("a"), cron="0 * * * *")
    app.schedule("operators", tick.new_job("code"), cron="0 * * * *")
    async with harness(app) as harnessed:
        await app.schedules.add("operators", tick.new_job("by hand"), every=600)
        await app.schedules.add("by-hand", tick.new_job("b"), every=600)
        await live_briefly(harnessed)
        first = {schedule.name: schedule for schedule in await app.schedules.find_all()}
        app.declared.clear()
        app.schedule("kept", tick.new_job("changed"), cron="0 * * * *")
        await live_briefly(harnessed)
        second = {schedule.name: schedule for schedule in await app.schedules.find_all()}
        with pytest.raises(Conflict, match="declared in code"):
            await app.schedules.add("kept", tick.new_job("b"), every=600, replace_existing=True)
    assert sorted(first) == ["by-hand", "dropped", "kept", "operators"]
    assert first["operators"].owner is None
    assert sorted(second) == ["by-hand", "kept", "operators"]
    assert '"changed"' in second["kept"].job.payload
    assert (second["kept"].id, second["kept"].next_us) == (first["kept"].id, first["kept"].next_us)
    assert [event.declared for event in recorder.of(DeclarationIgnored)] == ["schedule operators"]


async def test_schedule_of_another_application_is_not_removed(app: Holdfast) -> None:
    recorder = Recorder(app)
    other = Holdfast(app.settings.url)

    @other.task("theirs")
    async def theirs() -> None: ...

    other.schedule("theirs", theirs.new_job(), cron="0 * * * *")
    app.declared.update(other.declared)
    async with harness(app) as harnessed:
        await live_briefly(harnessed)
        app.declared.clear()
        await live_briefly(harnessed)
        assert [schedule.name for schedule in await app.schedules.find_all()] == ["theirs"]
    (kept,) = recorder.of(DeclarationIgnored)
    assert "schedule_owner" in kept.remedy


async def test_change_of_the_time_begins_anew_and_keeps_the_count(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        await app.schedules.add("s", tick.new_job(), every=600)
        await harnessed.start()
        await harnessed.advance(601)
        await app.schedules.add("s", tick.new_job(), every=30, replace_existing=True)
        changed = await app.schedules.get("s")
        await harnessed.advance(61)
        after = await app.schedules.get("s")
    assert changed.runs == 1
    assert after.runs == 3


async def test_ticker_goes_on_after_the_store_was_away(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        await app.schedules.add("minutely", tick.new_job(), cron="* * * * *", catch_up=100)
        worker = await harnessed.start()
        await harnessed.advance(MINUTE + 1)
        worker.cut_off()
        await harnessed.advance(5 * MINUTE)
        worker.thaw()
        await harnessed.advance(5 * MINUTE)
        schedule = await app.schedules.get("minutely")
    assert schedule.runs + schedule.missed == 11
    assert schedule.runs == 11


async def test_frozen_ticker_fires_nothing_twice(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        await app.schedules.add("minutely", tick.new_job(), cron="* * * * *")
        frozen = await harnessed.start()
        await harnessed.advance(MINUTE + 1)
        frozen.freeze()
        await harnessed.start()
        await harnessed.advance(5 * MINUTE)
        frozen.thaw()
        await harnessed.advance(5 * MINUTE)
        assert await count_jobs(app) == 11


async def test_unusable_schedules_hold_up_no_other(app: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    monkeypatch.setattr(ticker, "_BATCH", 1)
    recorder = Recorder(app)
    async with harness(app) as harnessed:
        broken = await app.schedules.add("broken", tick.new_job(), cron="* * * * *")
        await app.schedules.add("sound", tick.new_job(), cron="* * * * *")
        store = await app.open_store()
        await store.schedules.write_schedule(
            ScheduleChange(replace(broken, zone="Atlantis/Poseidonis"), broken.revision)
        )
        await harnessed.start()
        await harnessed.advance(3 * MINUTE + 1)
        assert (await app.schedules.get("sound")).runs == 3
    assert any("Atlantis" in event.error for event in recorder.of(StoreTrouble))


async def test_follower_fires_nothing(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    app.schedule("minutely", tick.new_job(), cron="* * * * *")
    async with harness(app) as harnessed:
        await harnessed.start(role="follower")
        await harnessed.advance(3 * MINUTE)
        assert await app.schedules.find_all() == []


async def test_bad_schedules_are_refused_with_the_field(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    bad: list[tuple[str, dict[str, Any]]] = [
        ("schedule", {}),
        ("schedule", {"cron": "* * * * *", "every": 60}),
        ("cron", {"cron": "* * * *"}),
        ("cron", {"cron": "*/0 * * * *"}),
        ("cron", {"cron": "0 0 31 2 *"}),
        ("cron", {"cron": "@reboot"}),
        ("cron", {"cron": "0 0 0 1 1 *"}),
        ("cron", {"cron": "*" * 10_000}),
        ("cron", {"cron": 5}),
        ("zone", {"cron": "* * * * *", "zone": "Mars/Olympus"}),
        ("zone", {"cron": "* * * * *", "zone": "../../etc/passwd"}),
        ("zone", {"every": 60, "zone": "Europe/Zurich"}),
        *(("every", {"every": value}) for value in (0, "5", -1)),
        ("at", {"at": "tomorrow"}),
        ("at", {"at": datetime(2001, 1, 1, tzinfo=UTC)}),
        *(("catch_up", {"every": 60, "catch_up": value}) for value in (101, -1)),
        ("overlap", {"every": 60, "overlap": "never"}),
        ("jitter", {"every": 60, "jitter": "2d"}),
        ("max_runs", {"every": 60, "max_runs": 0}),
        ("option", {"evry": 60}),
    ]
    async with harness(app):
        for field, options in bad:
            with pytest.raises(Invalid) as refused:
                await app.schedules.add("s", tick.new_job(), **options)
            assert refused.value.field == field, options
        batch = await app.enqueue_batch([tick.new_job()])
        unfit: list[dict[str, Any]] = [{"delay": 5}, {"key": "k"}, {"after": batch}, {"batch": batch}]
        for given in unfit:
            with pytest.raises(Invalid, match="scheduled job") as refused:
                await app.schedules.add("s", tick.options(**given).new_job(), every=60)
            assert [refused.value.field] == list(given)
        with pytest.raises(Invalid):
            await app.schedules.add("No Good Name", tick.new_job(), every=60)
        for call in (app.schedules.get, app.schedules.pause, app.schedules.remove, app.schedules.run):
            with pytest.raises(NotFound):
                await call("missing")
        assert await app.schedules.find_all() == []


async def test_racing_changes_lose_no_tick_and_no_change(app: Holdfast) -> None:
    @app.task("tick")
    async def tick() -> None: ...

    async with harness(app) as harnessed:
        await app.schedules.add("s", tick.new_job(), every=60)
        await asyncio.gather(*[app.schedules.pause("s") for _ in range(5)])
        await asyncio.gather(*[app.schedules.resume("s") for _ in range(5)])
        schedule = await app.schedules.get("s")
        assert not schedule.paused
        await harnessed.start()
        await harnessed.advance(61)
        assert await count_jobs(app) == 1


@pytest.mark.parametrize("night", ["2031-03-30T00:00:00Z", "2031-10-26T00:00:00Z"])
async def test_every_minute_of_a_night_with_a_clock_change_runs_once(app: Holdfast, night: str) -> None:
    """By the local clock of Zurich, whose clocks change at 01:00 UTC."""
    started: list[datetime] = []

    @app.task("tick")
    async def tick() -> None:
        started.append(harnessed.now)

    begin = datetime.fromisoformat(night)
    async with harness(app) as harnessed:
        harnessed.clock.advance((begin - harnessed.now).total_seconds())
        await app.schedules.add("minutely", tick.new_job(), cron="* * * * *", zone="Europe/Zurich")
        await app.schedules.add("daily", tick.new_job(), cron="30 2 * * *", zone="Europe/Zurich", max_runs=1)
        await harnessed.start()
        await harnessed.advance(2 * HOUR)  # the hour before the change, and the one after it
        daily = await app.schedules.get("daily")
    fixed = begin + timedelta(hours=1) if begin.month == 3 else begin + timedelta(minutes=30)
    assert sorted(started) == sorted([*(begin + timedelta(minutes=n) for n in range(1, 121)), fixed])
    assert daily.local_time(daily.last_us or 0).isoformat() == (
        "2031-03-30T03:00:00+02:00" if begin.month == 3 else "2031-10-26T02:30:00+02:00"
    )


async def test_job_before_is_not_cancelled_while_the_next_is_not_stored(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_write(name: str) -> None:
        if name == "tick.before_write":
            raise Unavailable("the store is away")

    @app.task("slow")
    async def slow() -> None:
        await harnessed.clock.sleep(HOUR)

    async with harness(app) as harnessed:
        await app.schedules.add("s", slow.new_job(), every=60, overlap="cancel_previous")
        await harnessed.start()
        await harnessed.advance(61)
        monkeypatch.setattr(ticker, "fault_point", refuse_write)
        await harnessed.advance(MINUTE)
        await app.schedules.pause("s")
        states = [job.state for job in (await app.find()).jobs]
        await app.cancel(JobFilter())
    assert states == [JobState.RUNNING]


async def test_run_kept_out_by_a_unique_key_counts_as_skipped(app: Holdfast) -> None:
    @app.task("slow", unique="active")
    async def slow() -> None:
        await harnessed.clock.sleep(HOUR)

    fired = Recorder(app)
    async with harness(app) as harnessed:
        await app.schedules.add("s", slow.new_job(), every=60, overlap="cancel_previous")
        holder = await slow.options(delay=HOUR).enqueue()
        await harnessed.start()
        await harnessed.advance(2 * MINUTE + 1)
        kept_out = await app.schedules.get("s")
        await app.cancel(holder.id)
        await harnessed.advance(2 * MINUTE)
        after = await app.schedules.get("s")
        jobs = (await app.find(JobFilter(tag="schedule:s"))).jobs
        await app.cancel(JobFilter())
    assert (kept_out.runs, kept_out.skipped, kept_out.last_us, kept_out.last_job) == (0, 2, None, holder.id)
    assert (after.runs, after.skipped, after.last_job) == (1, 3, jobs[0].id)
    assert [job.state for job in jobs] == [JobState.RUNNING]
    assert [(len(event.job_ids), event.skipped) for event in fired.of(ScheduleFired)] == [(0, 1)] * 2 + [(1, 0), (0, 1)]
