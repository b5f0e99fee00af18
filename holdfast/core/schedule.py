"""Schedules: when a job recurs, and which of its runs are due. Pure arithmetic; a store says what the time is.

A *tick* is an instant of a schedule. One tick makes at most one job: the store replaces a revision of the schedule in
the same write that submits the jobs of its ticks, and the job's id is derived from schedule and tick.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Meta
from msgspec.structs import replace

from holdfast.core.encryption import require_decrypted
from holdfast.core.errors import Invalid
from holdfast.core.ids import make_id
from holdfast.core.models import MICROSECOND, NewJob, Options, to_datetime, to_microseconds
from holdfast.core.validation import check_name, check_priority, check_task_name, decode_stored, parse_count

MAX_CATCH_UP = 100
"""Missed runs that a schedule can make up for at once."""
MAX_BACKFILL = 10_000
"""Runs that one backfill can submit."""
MAX_EXPRESSION = 200
"""Characters of a cron expression."""
ON_TIME = timedelta(seconds=60)
"""A run that is no later than this is not missed, even where missed runs are skipped."""
ALERTS_SCHEDULE = "holdfast.alerts"
"""Schedule that never runs: its document keeps the alerts (`core.alerts`), so lists leave it out."""
MIN_INTERVAL, MAX_INTERVAL = timedelta(seconds=1), timedelta(days=3660)
MAX_JITTER = timedelta(days=1)
_ROUND = 1000  # ticks that are looked at one by one before a long gap is jumped over
_MAX_YEAR = 9000  # of an instant that a calendar can still count from
_Instant = Annotated[int, Meta(ge=0, le=to_microseconds(datetime(_MAX_YEAR, 1, 1, tzinfo=UTC)))]
_Interval = Annotated[int, Meta(ge=MIN_INTERVAL // MICROSECOND, le=MAX_INTERVAL // MICROSECOND)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class Overlap(StrEnum):
    """What a tick does while the job of the tick before it has not ended."""

    ALLOW = "allow"  # submit the job all the same
    SKIP = "skip"  # submit none
    QUEUE_ONE = "queue_one"  # submit it if the one before runs already: at most one waits
    CANCEL_PREVIOUS = "cancel_previous"  # submit it, then cancel the one before


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A recurring job. Exactly one of ``cron``, ``every_us`` and ``at_us`` says when.

    ``job`` is the template of its jobs. ``owner``: the application whose code declares it; None: an operator made it.
    ``next_us``: its next tick; None: it has no more. ``revision`` grows with each write; a store sets it.
    """

    id: str
    name: str
    job: NewJob
    cron: str | None = None
    zone: str = "UTC"
    every_us: _Interval | None = None
    at_us: _Instant | None = None
    start_us: _Instant = 0  # intervals are counted from here
    catch_up: Annotated[int, Meta(ge=0, le=MAX_CATCH_UP)] = 1
    overlap: Overlap = Overlap.ALLOW
    jitter_us: Annotated[int, Meta(ge=0, le=MAX_JITTER // MICROSECOND)] = 0
    max_runs: _Count | None = None
    owner: str | None = None
    paused: bool = False
    next_us: _Instant | None = None
    runs: _Count = 0
    missed: _Count = 0  # ticks whose job was never submitted: too late, or more than ``catch_up``
    skipped: _Count = 0  # ticks whose job was not submitted because of ``overlap`` or a unique key
    last_us: _Instant | None = None  # the latest tick whose job was submitted
    last_job: str | None = None
    revision: int = 0

    @property
    def due_us(self) -> int | None:
        """The tick a ticker waits for; None while the schedule is paused or has no more ticks."""
        return None if self.paused else self.next_us

    @property
    def has_runs_left(self) -> bool:
        """False once it ran ``max_runs`` times."""
        return self.max_runs is None or self.runs < self.max_runs

    @property
    def timing(self) -> tuple[object, ...]:
        """The part of the definition that decides its ticks."""
        return self.cron, self.zone, self.every_us, self.at_us

    def local_time(self, tick_us: int) -> datetime:
        """An instant in the schedule's own time zone."""
        return to_datetime(tick_us).astimezone(find_zone(self.zone))

    def describe_timing(self) -> str:
        """When it runs, in words: ``cron 0 3 * * * (Europe/Zurich)``, ``every 300 s``, ``at 2027-01-01T00:00:00Z``."""
        if self.cron is not None:
            return f"cron {self.cron} ({self.zone})"
        if self.every_us is not None:
            return f"every {self.every_us / 1e6:g} s"
        return f"at {to_datetime(self.at_us or 0).isoformat().replace('+00:00', 'Z')}"


class ScheduleChange(msgspec.Struct, frozen=True):
    """A write of one schedule, with the jobs of its ticks, in one transaction.

    ``expected``: the revision it replaces; 0: there is no schedule of this name; -1: any. ``remove``: delete it.
    """

    schedule: Schedule
    expected: int
    jobs: Sequence[NewJob] = ()
    remove: bool = False


class DueSchedules(msgspec.Struct, frozen=True):
    """Schedules whose next tick has come, by the store's clock, and when the next one's comes."""

    schedules: list[Schedule]
    now_us: int
    next_us: int | None  # the first tick that is still to come, of any schedule


class DueTicks(NamedTuple):
    """The ticks of a schedule that have come, as its policies see them."""

    run: list[int]  # those whose jobs are to be submitted
    missed: int
    next_us: int | None  # the one after them, unless the schedule ends with them


def check_timing(*, cron: str | None, zone: str, every: timedelta | None, at: datetime | None) -> None:
    """Raises `Invalid` if not exactly one of the three says when, or if it can never be."""
    given = [name for name, value in (("cron", cron), ("every", every), ("at", at)) if value is not None]
    if len(given) != 1:
        raise Invalid("schedule", ", ".join(given) or "no time", "give exactly one of cron, every and at")
    if cron is None and zone != "UTC":
        raise Invalid("zone", zone, "give it with cron; an interval or an instant has no zone")
    if cron is not None:
        check_cron(cron, zone)
    if every is not None and not MIN_INTERVAL <= every <= MAX_INTERVAL:
        raise Invalid("every", f"{every.total_seconds():g} s", "give 1 second to 3660 days")


def check_cron(expression: str, zone: str) -> None:
    """Raises `Invalid`, naming the field, for an expression or a time zone that is none, or that never fires."""
    tz = find_zone(zone)
    remedy = 'give five fields, minute hour day month weekday, like "0 3 * * MON-FRI"'
    if len(expression) > MAX_EXPRESSION:
        raise Invalid("cron", f"{expression[:40]}…", f"give at most {MAX_EXPRESSION} characters")
    if len(expression.split()) != 5:
        raise Invalid("cron", expression, remedy)
    try:
        next(CronSim(expression, datetime(2026, 1, 1, tzinfo=tz)))
    except CronSimError as error:
        raise Invalid("cron", expression, f"{str(error).lower()}: {remedy}, that can come true") from None
    except StopIteration:
        raise Invalid("cron", expression, "give one that comes true: this one never fires") from None


def find_zone(name: str) -> ZoneInfo:
    """The time zone of that name; raises `Invalid` if there is none."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise Invalid("zone", name, "give a name of the IANA database, like Europe/Zurich or UTC") from None


def next_tick(schedule: Schedule, after_us: int) -> int | None:
    """The first tick of a schedule after an instant; None if there is none."""
    return next(iterate_ticks(schedule, after_us), None)


def iterate_ticks(schedule: Schedule, after_us: int) -> Iterator[int]:
    """The ticks of a schedule after an instant, in order."""
    if schedule.at_us is not None:
        return iter([schedule.at_us] if schedule.at_us > after_us else [])
    if schedule.every_us is not None:
        return _interval_ticks(schedule.start_us, schedule.every_us, after_us)
    return _cron_ticks(schedule.cron or "", find_zone(schedule.zone), after_us)


def _interval_ticks(start_us: int, every_us: int, after_us: int) -> Iterator[int]:
    tick = start_us + max(1, (after_us - start_us) // every_us + 1) * every_us
    while True:
        yield tick
        tick += every_us


def _cron_ticks(expression: str, zone: ZoneInfo, after_us: int) -> Iterator[int]:
    """Ticks as Debian's cron has them: a fixed local time that does not exist runs at the first instant that does; one
    that comes twice runs the first time. With ``*`` in minute or hour, skipped local times are not run later.
    """
    start = to_datetime(after_us).astimezone(zone)
    if start.year > _MAX_YEAR:
        return
    latest = after_us
    for found in CronSim(expression, start):
        tick = to_microseconds(found.astimezone(UTC))
        if tick > latest:  # within the hour that comes twice, it begins with the first one
            yield (latest := tick)


def due_ticks(schedule: Schedule, now_us: int) -> DueTicks:
    """Which ticks up to an instant are to run, how many are missed, and the next one.

    Of a long time only the first and the latest ticks are looked at; the number of missed ones is then a lower bound.
    """
    tick = schedule.next_us
    latest: deque[int] = deque(maxlen=max(1, schedule.catch_up))
    seen = 0
    ticks = iterate_ticks(schedule, schedule.next_us or now_us)
    while tick is not None and tick <= now_us:
        latest.append(tick)
        seen += 1
        if seen == _ROUND:
            found = _last_ticks(schedule, tick, now_us)
            seen += len(found)
            latest.extend(found)
            ticks = iterate_ticks(schedule, now_us)
        tick = next(ticks, None)
    run = list(latest)
    if schedule.catch_up == 0 and run and now_us - run[-1] > ON_TIME // MICROSECOND:
        run = []
    if schedule.overlap is not Overlap.ALLOW:
        run = run[-1:]
    missed = seen - len(run)
    if schedule.max_runs is not None:  # it ends with its last run: a tick after that is not missed
        run = run[: max(0, schedule.max_runs - schedule.runs)]
    return DueTicks(run, missed, tick)


def _last_ticks(schedule: Schedule, tick_us: int, now_us: int) -> list[int]:
    """The latest ticks between the first round and now, as many as are made up for. Searches a window that grows until
    it has them: the ticks of a cron expression may come in bursts."""
    span = tick_us - (schedule.next_us or 0)
    while True:
        after = max(tick_us, now_us - span)
        found = list(itertools.takewhile(lambda tick: tick <= now_us, iterate_ticks(schedule, after)))
        if after == tick_us or len(found) >= max(1, schedule.catch_up):
            return found
        span *= 2


def tick_job(schedule: Schedule, tick_us: int) -> NewJob:
    """The job of a tick. Its id is derived from the schedule and the tick, and so is its share of the jitter.

    Raises DecryptionFailed for an encrypted schedule: only a program with its key can encrypt the payload for a job.
    """
    require_decrypted(schedule.job.payload, f"the payload of schedule {schedule.name}")
    digest = hashlib.sha256(f"{schedule.id} {tick_us}".encode()).digest()
    milliseconds = max(0, tick_us // 1000) & 0xFFFFFFFFFFFF
    jitter = int.from_bytes(digest[10:18], "big") % (schedule.jitter_us + 1)
    return replace(
        schedule.job,
        id=make_id(milliseconds.to_bytes(6, "big"), digest),
        has_client_id=True,  # it returns if the tick is run again after its job was deleted
        delay=jitter * MICROSECOND if jitter else None,
        options=_marked(schedule, to_datetime(tick_us).isoformat().replace("+00:00", "Z")),
    )


def without_alerts(schedules: Iterable[Schedule]) -> list[Schedule]:
    """Returns the schedules that make jobs: all but the one that keeps the alerts."""
    return [each for each in schedules if each.name != ALERTS_SCHEDULE]


def schedule_tag(name: str) -> str:
    """The tag of every job of a schedule."""
    return f"schedule:{name}"


def _marked(schedule: Schedule, tick: str) -> Options:
    """The options of the template, with the schedule's tag and the tick in the metadata."""
    options = schedule.job.options or Options()
    metadata = {**(options.metadata or {}), "schedule": schedule.name, "scheduled_for": tick}
    return replace(options, tags=(*options.tags, schedule_tag(schedule.name)), metadata=metadata)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Schedule).decode


def encode_schedule(schedule: Schedule) -> str:
    """The JSON document that a store keeps, without the revision, which stands beside it."""
    return _encode(replace(schedule, revision=0)).decode()


def decode_schedules(rows: Iterable[Sequence[Any]]) -> list[Schedule]:
    """Schedules of documents and revisions, but for spoiled ones: see ``decode_stored``."""
    return decode_stored("schedule", _decode_with_ticks, rows)


def _decode_with_ticks(document: str | bytes) -> Schedule:
    """The schedule of a document; ValueError for one whose ticks cannot be computed, or whose jobs are none."""
    schedule = _decode(document)
    try:
        check_name("queue", schedule.job.queue)
        check_task_name(schedule.job.task)
        check_priority(schedule.job.priority)
        attempts = schedule.job.max_attempts
        parse_count(1 if attempts is None else attempts, "max_attempts", least=1, most=1 << 31)
        if schedule.cron is not None or schedule.every_us is schedule.at_us is None:
            CronSim(schedule.cron or "", to_datetime(0))
    except (CronSimError, Invalid) as error:
        raise ValueError(f"{schedule.name}: {error}") from None
    return schedule
