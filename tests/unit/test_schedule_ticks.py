"""The arithmetic of schedules: ticks around changes of the clock, missed ticks, ids of ticks."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from holdfast.core.models import NewJob, to_datetime, to_microseconds
from holdfast.core.schedule import Overlap, Schedule, due_ticks, iterate_ticks, next_tick, tick_job

ZONES = {  # of 2027: the night clocks go forward, the night they go back
    "Europe/Zurich": (datetime.fromisoformat("2027-03-28"), datetime.fromisoformat("2027-10-31"), 2),
    "America/New_York": (datetime.fromisoformat("2027-03-14"), datetime.fromisoformat("2027-11-07"), 2),
    "Australia/Sydney": (datetime.fromisoformat("2027-10-03"), datetime.fromisoformat("2027-04-04"), 2),
    "America/Santiago": (datetime.fromisoformat("2027-09-05"), datetime.fromisoformat("2027-04-03"), 0),
}
HALF_HOUR = {"Australia/Lord_Howe": (datetime.fromisoformat("2027-10-03"), datetime.fromisoformat("2027-04-04"))}


def schedule_of(**fields: Any) -> Schedule:
    return Schedule(
        **{
            "id": "0198c0de-0000-7000-8000-000000000001",
            "name": "s",
            "job": NewJob(id="", task="t", payload="{}"),
            **fields,
        }
    )


def local_ticks(expression: str, zone: str, start: datetime, end: datetime) -> list[datetime]:
    tz = ZoneInfo(zone)
    schedule = schedule_of(cron=expression, zone=zone)
    begin, stop = (to_microseconds(each.replace(tzinfo=tz).astimezone(UTC)) for each in (start, end))
    found = []
    for tick in iterate_ticks(schedule, begin - 1):
        if tick >= stop:
            return found
        found.append(to_datetime(tick).astimezone(tz))
    return found


@pytest.mark.parametrize("zone", ZONES)
def test_fixed_time_in_the_missing_hour_runs_once_at_the_first_instant(zone: str) -> None:
    night, _, hour = ZONES[zone]
    (tick,) = local_ticks(f"30 {hour} * * *", zone, night, night + timedelta(days=1))
    assert (tick.day, tick.hour, tick.minute) == (night.day, hour + 1, 0)


@pytest.mark.parametrize("zone", ZONES)
def test_fixed_time_in_the_repeated_hour_runs_the_first_time_only(zone: str) -> None:
    _, night, hour = ZONES[zone]
    repeated = hour if zone in ("Europe/Zurich", "Australia/Sydney") else 1 if hour else 23
    if zone == "Europe/Zurich":
        repeated = 2
    (tick,) = local_ticks(f"30 {repeated} * * *", zone, night, night + timedelta(days=1))
    assert (tick.hour, tick.minute, tick.fold) == (repeated, 30, 0)


@pytest.mark.parametrize("zone", [*ZONES, *HALF_HOUR])
@pytest.mark.parametrize("forward", [True, False])
def test_every_minute_of_a_month_around_a_change_is_a_tick_once(zone: str, forward: bool) -> None:
    change = (ZONES | HALF_HOUR)[zone][0 if forward else 1]
    start, end = change - timedelta(days=15), change + timedelta(days=15)
    ticks = local_ticks("* * * * *", zone, start, end)
    instants = [tick.astimezone(UTC) for tick in ticks]
    assert {later - earlier for earlier, later in pairwise(instants)} == {timedelta(minutes=1)}
    tz = ZoneInfo(zone)
    assert len(ticks) == (
        end.replace(tzinfo=tz).astimezone(UTC) - start.replace(tzinfo=tz).astimezone(UTC)
    ) // timedelta(minutes=1)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", ["0 * * * *", "*/30 * * * *", "*/15 2 * * *", "17 */2 * * *"])
def test_ticks_with_a_wildcard_grow_and_never_repeat(zone: str, expression: str) -> None:
    for change in ZONES[zone][:2]:
        ticks = local_ticks(expression, zone, change - timedelta(days=1), change + timedelta(days=2))
        instants = [tick.astimezone(UTC) for tick in ticks]
        assert instants == sorted(set(instants))
        assert all(tick.minute in (0, 15, 17, 30, 45) for tick in ticks)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", ["30 2 * * *", "0,30 1 * * *", "59 23 * * *", "0 0 * * *", "30 3 * * SUN"])
def test_fixed_times_run_once_on_each_of_sixty_days(zone: str, expression: str) -> None:
    for change in ZONES[zone][:2]:
        start = change - timedelta(days=30)
        ticks = local_ticks(expression, zone, start, start + timedelta(days=60))
        at = [tick.astimezone(UTC) for tick in ticks]
        assert at == sorted(set(at))
        days = {tick.date() for tick in ticks}
        per_day = 2 if "," in expression else 1
        assert len(days) == (60 if "SUN" not in expression else len(days))
        assert per_day * len(days) - 1 <= len(ticks) <= per_day * len(days)


def test_search_from_any_instant_of_the_repeated_hour_finds_a_later_tick() -> None:
    schedule = schedule_of(cron="30 2 * * *", zone="Europe/Zurich")
    begin = to_microseconds(datetime(2027, 10, 30, 22, tzinfo=UTC))
    for minute in range(0, 600, 7):
        after = begin + minute * 60_000_000
        tick = next_tick(schedule, after)
        assert tick is not None
        assert tick > after


def test_leap_day_comes_every_four_years() -> None:
    ticks = islice(iterate_ticks(schedule_of(cron="0 0 29 2 *"), to_microseconds(datetime(2026, 1, 1, tzinfo=UTC))), 3)
    assert [to_datetime(tick).year for tick in ticks] == [2028, 2032, 2036]


@pytest.mark.parametrize("expression", ["0 0 29 2 *", "* * * * *"])
def test_no_tick_comes_after_the_last_year_of_the_calendar(expression: str) -> None:
    end = to_microseconds(datetime(9999, 12, 31, 12, tzinfo=UTC))
    assert next_tick(schedule_of(cron=expression), end) is None


def test_interval_is_not_moved_by_a_change_of_the_clock() -> None:
    schedule = schedule_of(every_us=3600_000_000, start_us=5)
    assert list(islice(iterate_ticks(schedule, 5), 3)) == [5 + n * 3600_000_000 for n in (1, 2, 3)]
    assert next_tick(schedule, 3600_000_000 * 10) == 5 + 3600_000_000 * 10


def test_years_of_missed_minutes_are_counted_within_moments() -> None:
    start = to_microseconds(datetime(2026, 1, 1, tzinfo=UTC))
    schedule = schedule_of(cron="* * * * *", catch_up=100, next_us=start)
    now = to_microseconds(datetime(2036, 1, 1, 0, 0, 30, tzinfo=UTC))
    began = time.process_time()
    due = due_ticks(schedule, now)
    assert time.process_time() - began < 2
    assert due.run == [now - 30_000_000 - 60_000_000 * n for n in reversed(range(100))]
    assert due.next_us == now + 30_000_000
    assert due.missed >= 1000


@pytest.mark.parametrize("away", [0.5, 1.3, 19, 45, 400])
@pytest.mark.parametrize(
    "expression", ["* * 1 * *", "*/2 * 1 * *", "* * 1 1 *", "* * * 1 *", "0 * * * MON", "0 0 1 * *"]
)
def test_latest_ticks_are_made_up_for_when_they_come_in_bursts(expression: str, away: float) -> None:
    start = to_microseconds(datetime(2027, 1, 1, tzinfo=UTC))
    now = start + int(away * 86400) * 1_000_000 + 1
    ticks = [*takewhile(lambda tick: tick <= now, iterate_ticks(schedule_of(cron=expression), start - 1))]
    for catch_up in (1, 5, 100):
        due = due_ticks(schedule_of(cron=expression, catch_up=catch_up, next_us=ticks[0] if ticks else now + 1), now)
        assert due.run == ticks[-catch_up:], catch_up
        assert min(len(ticks), 1000) <= due.missed + len(due.run) <= len(ticks), catch_up


@pytest.mark.parametrize("overlap", [each for each in Overlap if each is not Overlap.ALLOW])
def test_missed_ticks_that_may_not_overlap_are_made_up_for_by_one(overlap: Overlap) -> None:
    schedule = schedule_of(every_us=60, next_us=60, catch_up=10, overlap=overlap)
    assert due_ticks(schedule, 600) == ([600], 9, 660)


@pytest.mark.parametrize(
    ("catch_up", "runs", "expected"),
    [
        (100, 9, ([60], 0, 420)),  # the ticks after the tenth run are none of this schedule's
        (100, 7, ([60, 120, 180], 0, 420)),
        (3, 8, ([240, 300], 3, 420)),
        (1, 9, ([360], 5, 420)),
        (100, 4, ([60, 120, 180, 240, 300, 360], 0, 420)),
        (100, 3, ([60, 120, 180, 240, 300, 360], 0, 420)),
    ],
)
def test_no_tick_after_the_last_run_is_missed(catch_up: int, runs: int, expected: tuple[list[int], int, int]) -> None:
    schedule = schedule_of(every_us=60, next_us=60, catch_up=catch_up, runs=runs, max_runs=10)
    assert due_ticks(schedule, 400) == expected


def test_due_ticks_of_a_schedule_that_is_not_due_are_none() -> None:
    schedule = schedule_of(every_us=60_000_000, next_us=100)
    assert due_ticks(schedule, 99) == ([], 0, 100)


def test_ids_of_ticks_are_uuids_of_their_instant_and_differ_by_schedule() -> None:
    tick = to_microseconds(datetime(2031, 1, 1, tzinfo=UTC))
    one, again = tick_job(schedule_of(), tick), tick_job(schedule_of(runs=7, cron="* * * * *"), tick)
    other = tick_job(schedule_of(id="0198c0de-0000-7000-8000-000000000002"), tick)
    assert one.id == again.id
    assert len({one.id, other.id, tick_job(schedule_of(), tick + 1).id}) == 3
    assert one.id[14] == "7"
    assert int(one.id.replace("-", "")[:12], 16) == tick // 1000
    assert one.has_client_id  # it may return after its job was deleted: its claims begin at the clock
    assert one.options is not None
    assert one.options.tags == ("schedule:s",)
    assert one.options.metadata == {"schedule": "s", "scheduled_for": "2031-01-01T00:00:00Z"}
