"""Schedules of an application: declared in code, or made at run time by Python, CLI and HTTP."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Protocol, cast

import msgspec
from msgspec.structs import replace

from holdfast.app.handle import JobHandle, JobOwner
from holdfast.app.limits import check_replacement, found_definition, found_own, lost_race, warn_ignored, warn_of_foreign
from holdfast.app.sync import Blocker, BlockingMethod, BlockingView
from holdfast.core.errors import Conflict, Invalid, NotFound, QueueFull, Unavailable
from holdfast.core.events import Events
from holdfast.core.ids import new_id
from holdfast.core.models import MICROSECOND, Job, NewJob, Submitted, to_datetime, to_microseconds
from holdfast.core.portal import requires_loop
from holdfast.core.schedule import (
    ALERTS_SCHEDULE,
    MAX_BACKFILL,
    MAX_CATCH_UP,
    MAX_JITTER,
    Overlap,
    Schedule,
    ScheduleChange,
    check_timing,
    iterate_ticks,
    next_tick,
    tick_job,
    without_alerts,
)
from holdfast.core.validation import (
    check_metadata,
    check_name,
    check_options,
    check_span,
    check_tags,
    parse_count,
    parse_instant,
)
from holdfast.settings.settings import Settings
from holdfast.stores.base import Store
from holdfast.tasks import Registry

_TRIES = 20  # writes that lose a race before a change gives up
_PAGE = 500
_OWNED = "code"
_STATE = ("id", "start_us", "paused", "next_us", "runs", "missed", "skipped", "last_us", "last_job", "revision")
"""What a schedule has become, beside how it is defined."""


class ScheduleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When a scheduled job runs, and what happens to runs that are late, overlap or are enough.

    Exactly one of ``cron`` (five fields, in the IANA time zone ``zone``), ``every`` (seconds, a timedelta or text like
    "5m") and ``at`` (an instant, once). ``catch_up``: missed runs to make up for, the latest ones; 0 skips them.
    ``jitter``: each run starts up to so much later. ``max_runs``: the schedule ends after so many.
    """

    cron: str | None = None
    zone: str = "UTC"
    every: float | timedelta | str | None = None
    at: datetime | str | None = None
    catch_up: int = 1
    overlap: Overlap | str = Overlap.ALLOW
    jitter: float | timedelta | str = 0
    max_runs: int | None = None


_CRONTAB = re.compile(r"<crontab: (\S+ \S+ (?:\* \S+ \S+|\S+ \S+ \*)) \(m/h/dM/MY/d\)>")
"""``repr`` of Celery's ``crontab(…)``, in the order of cron. Not with both days: cron takes either, Celery both."""


def draft_schedule(name: str, job: NewJob, options: ScheduleOptions, *, owner: str | None = None) -> Schedule:
    """The schedule that these options describe, without a next tick. Raises `Invalid`, naming the field."""
    if name == ALERTS_SCHEDULE:
        raise Invalid("schedule", name, "give it another name", "is where alerts are kept")
    _check_template(job)
    every = None if options.every is None else check_span(options.every, "every")
    at = None if options.at is None else parse_instant(options.at, "at")
    texts: dict[str, object] = {"cron": "" if options.cron is None else options.cron, "zone": options.zone}
    for field, value in texts.items():
        if not isinstance(value, str):
            crontab = _CRONTAB.fullmatch(repr(value))
            raise Invalid(field, value, f'here it is cron="{crontab[1]}"' if crontab else "give text")
    check_timing(cron=options.cron, zone=options.zone, every=every, at=at)
    schedule = Schedule(
        id=new_id(),
        name=check_name("schedule", name),
        job=job,
        cron=options.cron,
        zone=options.zone,
        every_us=None if every is None else every // MICROSECOND,
        at_us=None if at is None else to_microseconds(at),
        catch_up=parse_count(options.catch_up, "catch_up", least=0, most=MAX_CATCH_UP, text=False),
        overlap=_overlap(options.overlap),
        jitter_us=check_span(options.jitter, "jitter") // MICROSECOND,
        max_runs=None
        if options.max_runs is None
        else parse_count(options.max_runs, "max_runs", least=1, most=1_000_000_000, text=False),
        owner=owner,
    )
    if schedule.jitter_us > MAX_JITTER // MICROSECOND:
        raise Invalid("jitter", str(options.jitter), "give at most 1 day")
    if job.expires_in is not None and job.expires_in <= schedule.jitter_us * MICROSECOND:
        raise Invalid("expires", str(job.expires_in), f"give more than the jitter, {options.jitter}")
    sample = tick_job(schedule, 0).options
    if sample is not None:  # with what a schedule adds to them
        check_tags(sample.tags)
        check_metadata(sample.metadata)
    return replace(schedule, job=replace(job, id=""))


def _check_template(job: object) -> None:
    if not isinstance(job, NewJob):
        raise Invalid("job", job, "give a drafted job: task.new_job(…), or app.draft_job(name, payload)")
    times = {"delay": job.delay, "run_at": job.run_at_us, "after": job.after or None}
    for field, given in (times | {"key": job.key, "batch": job.batch}).items():
        if given is not None:
            raise Invalid(field, given, f"leave {field} out of a scheduled job: each run is a job of its own")
    if job.expires_at_us is not None:
        raise Invalid("expires", job.expires_at_us, 'give a span, such as "10m": it counts from each run')
    if job.has_client_id:
        raise Invalid("id", job.id, "leave it out of a scheduled job: each run has an id of its own")


def _overlap(value: object) -> Overlap:
    if not isinstance(value, str) or value not in tuple(Overlap):
        raise Invalid("overlap", value, f"give one of {', '.join(Overlap)}")
    return Overlap(value)


class ScheduleOwner(Blocker, Protocol):
    """The application that schedules belong to."""

    settings: Settings
    registry: Registry
    events: Events

    async def open_store(self) -> Store: ...

    async def submit(self, job: NewJob, *, connection: Any = None) -> JobHandle[Any]: ...


class ScheduleManager:
    """``app.schedules``: reads and changes schedules while workers run them."""

    def __init__(self, app: ScheduleOwner) -> None:
        self._app = app

    @property
    def sync(self) -> BlockingSchedules:
        """The same methods for blocking callers: ``app.schedules.sync.pause("nightly")``."""
        return BlockingSchedules(self._app, self)

    @requires_loop
    async def add(self, /, name: str, job: NewJob, *, replace_existing: bool = False, **options: Any) -> Schedule:
        """Add a schedule of drafted jobs: ``add("nightly", report.new_job(), cron="0 3 * * *", zone="Europe/Paris")``.

        The options are the fields of ``ScheduleOptions``. Raises `Conflict` if there is one of this name, unless
        ``replace_existing``; one that code declares is changed there.
        """
        draft = draft_schedule(name, job, schedule_options(options))
        if draft.at_us is not None and draft.at_us <= await self._now_us():
            raise Invalid("at", to_datetime(draft.at_us).isoformat(), "give an instant in the future")

        def new_definition(known: Schedule | None) -> Schedule | None:
            if known is None:
                return draft
            check_replacement(f"schedule {name}", known, replace_existing=replace_existing)
            return keep_progress(known, draft)

        return await self._change(name, new_definition)

    @requires_loop
    async def get(self, name: str) -> Schedule:
        """The schedule of this name; raises `NotFound` if there is none."""
        return await self._get(name)

    async def _get(self, name: str) -> Schedule:
        found = await (await self._app.open_store()).schedules.read_schedules(check_name("schedule", name))
        return found_definition(next(iter(without_alerts(found)), None), f"schedule {name}")

    @requires_loop
    async def find_all(self) -> list[Schedule]:
        """All schedules, by name."""
        store = await self._app.open_store()
        found: list[Schedule] = []
        while page := await store.schedules.read_schedules(after=found[-1].name if found else "", limit=_PAGE):
            found += page
        return without_alerts(found)

    @requires_loop
    async def remove(self, name: str) -> None:
        """Remove a schedule. The jobs it made stay. One that code declares returns with the next start of a worker."""
        await self._change(
            check_name("schedule", name), lambda known: found_definition(known, f"schedule {name}"), remove=True
        )

    @requires_loop
    async def pause(self, name: str) -> Schedule:
        """No tick makes a job until the schedule is resumed; the ticks in between are not missed, but left out."""
        return await self._change(name, lambda known: replace(found_definition(known, f"schedule {name}"), paused=True))

    @requires_loop
    async def resume(self, name: str) -> Schedule:
        """Undo ``pause``: the next tick is the first one from now on."""
        now_us = await self._now_us()

        def resume_from_now(known: Schedule | None) -> Schedule:
            schedule = found_definition(known, f"schedule {name}")
            if not schedule.paused:
                return schedule
            upcoming = next_tick(schedule, now_us) if schedule.has_runs_left else None
            return replace(schedule, paused=False, next_us=upcoming)

        return await self._change(name, resume_from_now)

    @requires_loop
    async def run(self, name: str) -> JobHandle[Any]:
        """Submit a job of the schedule now, beside its ticks: whether it is paused, overlaps or has ended."""
        schedule = await self._get(name)
        job = tick_job(schedule, await self._now_us())
        return await self._app.submit(replace(job, id=new_id(), has_client_id=False, delay=None))

    @requires_loop
    async def backfill(
        self, name: str, start: datetime | str, end: datetime | str, *, dry_run: bool = False
    ) -> list[JobHandle[Any]]:
        """Submit the jobs of all ticks from ``start`` to before ``end``, at most 10,000. A tick whose job is still in
        the store is not run again: its handle says ``created=False``. ``dry_run``: nothing is submitted, and
        ``created`` says which jobs would be. Unavailable and QueueFull say how many are stored by then."""
        schedule = await self._get(name)
        first, last = parse_instant(start, "start"), parse_instant(end, "end")
        if first >= last:
            raise Invalid("end", end, "give an instant after start")
        if to_microseconds(last) > await self._now_us():
            raise Invalid(
                "end", end, "give an instant in the past: the schedule itself submits the jobs of later ticks"
            )
        ticks = list(_between(schedule, to_microseconds(first), to_microseconds(last)))
        if len(ticks) > MAX_BACKFILL:
            raise Invalid("end", end, f"give a range of at most {MAX_BACKFILL:,} runs")
        jobs = [replace(tick_job(schedule, tick), delay=None) for tick in ticks]
        if dry_run:
            return await self._find_handles([job.id for job in jobs])
        handles: list[JobHandle[Any]] = []
        for job in jobs:
            try:
                handles.append(await self._app.submit(job))
            except (QueueFull, Unavailable) as error:
                known = f"{len(handles):,} of {len(jobs):,} jobs are stored; repeat the backfill to submit the others"
                stopped = type(error)(f"{error}; {known}")
                if isinstance(stopped, Unavailable):
                    stopped.outcome = known
                raise stopped from error
        return handles

    async def _find_handles(self, job_ids: Sequence[str]) -> list[JobHandle[Any]]:
        """Handles of jobs that may be stored; ``created``: they are not."""
        store = await self._app.open_store()
        found: list[Job | None] = []
        for first in range(0, len(job_ids), _PAGE):
            found += await store.query.summaries(job_ids[first : first + _PAGE])
        owner = cast(JobOwner, self._app)
        return [JobHandle(owner, Submitted(job_id, job is None)) for job_id, job in zip(job_ids, found, strict=True)]

    @requires_loop
    async def next_runs(self, name: str, count: int = 5) -> list[datetime]:
        """The next ticks of a schedule, in its own time zone; none if it is paused or has ended."""
        parse_count(count, "count", least=1, most=100, text=False)
        return upcoming_runs(await self._get(name), count)

    async def reconcile(self, declared: Mapping[str, Schedule]) -> None:
        """Bring the store in line with the schedules that this application's code declares: add, change, remove.

        An operator's schedule of the same name stays as it is. One that the code declares no more is removed; but where
        the setting ``schedule_owner`` is not given and its task is not registered here, it stays: it may be another
        application's.
        """
        owner = self._app.settings.schedule_owner or _OWNED
        for name, draft in declared.items():
            try:
                await self._change(name, _declaring(replace(draft, owner=owner), self._app.events))
            except Conflict as error:
                warn_ignored(f"schedule {name}", str(error), self._app.events)
        store = await self._app.open_store()
        after = ""
        while page := await store.schedules.read_schedules(after=after, limit=_PAGE):
            after = page[-1].name
            for known in page:
                if known.owner == owner and known.name not in declared:
                    await self._withdraw(known)

    async def _withdraw(self, known: Schedule) -> None:
        what = f"schedule {known.name}"
        if self._app.settings.schedule_owner is None and self._app.registry.get(known.job.task) is None:
            warn_ignored(
                what,
                f"its task {known.job.task} is not registered here, and no code of this application declares it",
                self._app.events,
                f"remove it (holdfast schedule remove {known.name}), or give each application that shares this store a "
                "schedule_owner of its own",
            )
            return
        with suppress(NotFound):
            await self._change(known.name, lambda found: found_own(found, known.owner, what), remove=True)

    async def _change(
        self, name: str, change: Callable[[Schedule | None], Schedule | None], *, remove: bool = False
    ) -> Schedule:
        """Writes or removes what ``change`` makes of the schedule, again after a concurrent write; None: keeps it."""
        store = await self._app.open_store()
        for attempt in range(_TRIES):
            found = await store.schedules.read_schedules(name)
            known = next(iter(found if remove else without_alerts(found)), None)  # to remove alerts forgets them
            changed = change(known)
            if changed is None or (changed == known and not remove):
                assert known is not None  # noqa: S101 - there is nothing to leave as it is
                return known
            if known is None or changed.timing != known.timing or changed.start_us != known.start_us:
                changed = await self._started(changed)
            expected = -(attempt % 2) if known is None else known.revision  # the next time replaces a spoiled one
            revision = await store.schedules.write_schedule(ScheduleChange(changed, expected, remove=remove))
            if revision is not None:
                return replace(changed, revision=revision)
        raise lost_race(f"schedule {name}")

    async def _started(self, schedule: Schedule) -> Schedule:
        """The schedule with its intervals counted from now, and its first tick."""
        now_us = await self._now_us()
        started = replace(schedule, start_us=now_us)
        return replace(started, next_us=next_tick(started, now_us))

    async def _now_us(self) -> int:
        return await (await self._app.open_store()).health.server_time_us()


class BlockingSchedules(BlockingView):
    """``app.schedules.sync``: the async methods for blocking callers."""

    __slots__ = ()

    add = BlockingMethod(ScheduleManager.add)
    get = BlockingMethod(ScheduleManager.get)
    find_all = BlockingMethod(ScheduleManager.find_all)
    remove = BlockingMethod(ScheduleManager.remove)
    pause = BlockingMethod(ScheduleManager.pause)
    resume = BlockingMethod(ScheduleManager.resume)
    run = BlockingMethod(ScheduleManager.run)
    backfill = BlockingMethod(ScheduleManager.backfill)
    next_runs = BlockingMethod(ScheduleManager.next_runs)


def schedule_options(options: Mapping[str, Any]) -> ScheduleOptions:
    """Options by name; raises `Invalid` for a name that is none."""
    check_options(options, ScheduleOptions.__struct_fields__)
    return ScheduleOptions(**options)


def upcoming_runs(schedule: Schedule, count: int) -> list[datetime]:
    """The next ticks of a schedule as aware datetimes in its own time zone."""
    if schedule.due_us is None:
        return []
    if schedule.max_runs is not None:
        count = min(count, max(0, schedule.max_runs - schedule.runs))
    ticks = itertools.chain([schedule.due_us], iterate_ticks(schedule, schedule.due_us))
    return [schedule.local_time(tick) for tick in itertools.islice(ticks, count)]


def keep_progress(known: Schedule, draft: Schedule) -> Schedule:
    """The new definition, with the progress of the schedule that it replaces."""
    state = {field: getattr(known, field) for field in _STATE}
    changed = replace(draft, **state)
    goes_on = known.next_us is None and changed.has_runs_left and draft.at_us is None
    return replace(changed, start_us=0) if goes_on else changed


def _declaring(draft: Schedule, events: Events) -> Callable[[Schedule | None], Schedule | None]:
    def declared_over(known: Schedule | None) -> Schedule | None:
        if known is None:
            return draft
        if known.owner != draft.owner:
            warn_of_foreign(f"schedule {known.name}", known, events)
            return known
        return keep_progress(known, draft)

    return declared_over


def _between(schedule: Schedule, first_us: int, last_us: int) -> itertools.islice[int]:
    ticks = iterate_ticks(replace(schedule, start_us=min(schedule.start_us, _before(schedule, first_us))), first_us - 1)
    return itertools.islice(itertools.takewhile(lambda tick: tick < last_us, ticks), MAX_BACKFILL + 1)


def _before(schedule: Schedule, first_us: int) -> int:
    """A start of the intervals before an instant, in step with the schedule's own."""
    every = schedule.every_us or 1
    return first_us - every - (first_us - schedule.start_us) % every
