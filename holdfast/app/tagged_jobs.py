"""The jobs of a tag as a whole: counts, a wait for their ends, and a stream of those that have ended."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from datetime import timedelta
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from holdfast.app.handle import JobHandle, JobOwner, checked_filter
from holdfast.core.errors import Invalid, NotFound, WaitTimeout
from holdfast.core.lifecycle import failure_of
from holdfast.core.models import TERMINAL, Job, JobEvent, JobEvents, JobFilter, JobState, Submitted
from holdfast.core.portal import requires_loop, running_loop
from holdfast.core.stats import StateCounts
from holdfast.core.validation import check_span, check_tag
from holdfast.stores.base import Store

_UNENDED = tuple(state for state in JobState if state not in TERMINAL)
_AWAITED = 100  # jobs whose ends are awaited together
_POLL_SECONDS = 5.0  # seconds between looks while waiting: what a lost notification costs at most
_PAGE_SIZE = 200  # events of one read of a stream
_PAUSE = 0.1  # seconds between reads of a stream that has reached the present
_MAX_AGE = timedelta(days=3650)  # of a cursor
_REPEATED_US = 1_500_000  # events so long before the last one may come again
_UNKNOWN = 1 << 62  # instant of an end of which a cursor keeps only the key
_CURSOR_REMEDY = "give the cursor of a job of an earlier stream from this store, or none to begin with the first job"


class StreamPosition(msgspec.Struct, frozen=True):
    """Position in a stream: a mark in the store's events, and what was delivered that may come again behind it."""

    mark: str | Annotated[int, Meta(ge=0, lt=1 << 60)]
    delivered: bytes = b""

    @classmethod
    def read(cls, cursor: str) -> StreamPosition:
        """Reads a cursor; Invalid for other text."""
        try:
            return msgspec.msgpack.decode(base64.b64decode(cursor, altchars=b"-_", validate=True), type=cls)
        except (TypeError, ValueError, msgspec.MsgspecError):
            raise Invalid("cursor", cursor, _CURSOR_REMEDY) from None

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode("ascii")


class EndedJob:
    """A job that has ended, from a stream."""

    __slots__ = ("_app", "_before", "_delivered", "job")

    def __init__(self, app: JobOwner, job: Job, before: StreamPosition, delivered: Sequence[bytes]) -> None:
        self._app = app
        self._before = before
        self._delivered = delivered
        self.job = job

    def __repr__(self) -> str:
        return f"<EndedJob {self.job.id} {self.job.state}>"

    def result(self) -> Any:
        """Returns the task's result; raises JobFailed if the job is dead, JobCancelled if it was cancelled."""
        failure = failure_of(self.job.id, self.job)
        if failure is not None:
            raise failure
        return JobHandle[Any](self._app, Submitted(self.job.id, created=True))._read_result(self.job)

    @property
    def cursor(self) -> str:
        """Returns the position behind this job: a stream with it goes on with the next one."""
        known = self._before.delivered + b"".join(self._delivered)
        return str(msgspec.structs.replace(self._before, delivered=known))


class _UnendedJobs:
    """Some jobs of a tag that have not ended: the newest, since they mostly end last."""

    def __init__(self, store: Store, tag: str) -> None:
        self._store = store
        self._where = JobFilter(tag=tag, states=_UNENDED)
        self.ids: list[str] = []

    async def count_if_ended(self) -> StateCounts | None:
        """Returns the counts once all jobs of the tag have ended. Looks for others only once those known have."""
        if self.ids:
            jobs = await self._store.query.summaries(self.ids)
            self.ids = [job.id for job in jobs if job is not None and job.state not in TERMINAL]
        if not self.ids:
            page = await self._store.query.find(self._where, limit=_AWAITED)
            self.ids = [job.id for job in page.jobs]
        if self.ids:
            return None
        # Redis searches in several steps, and may miss a job that another has added meanwhile; its count does not.
        counts = await self._store.query.count_states(JobFilter(tag=self._where.tag))
        return counts if counts.ended == counts.total else None


class _EventReader:
    """Reads the events of a store from a position on, and drops what was delivered."""

    def __init__(self, store: Store, tag: str, position: StreamPosition) -> None:
        self._store = store
        self._tag = tag
        self._delivered = dict.fromkeys(_split_keys(position.delivered), _UNKNOWN)
        self._last_us = 0
        self.mark = position.mark

    @property
    def position(self) -> StreamPosition:
        """Returns the position behind the pages read so far."""
        return StreamPosition(self.mark, b"".join(self._delivered))

    async def read_page(self) -> tuple[list[tuple[bytes, Job]], JobEvents]:
        """Returns the next jobs of the tag, each with the key of its end, and the page of events."""
        try:
            page = await self._store.query.events(self.mark, limit=_PAGE_SIZE, max_age=_MAX_AGE)
        except Invalid:
            raise Invalid("cursor", self.mark, _CURSOR_REMEDY) from None
        if page.gap and not page.events:
            raise Invalid("cursor", self.mark, _CURSOR_REMEDY)
        ends = {each.job_id: each for each in page.events if each.state in TERMINAL}
        fresh = {id: end for id, end in ends.items() if _key_of(end) not in self._delivered}
        summaries = await self._store.query.summaries([*fresh])
        tagged = [job.id for job in summaries if job is not None and self._tag in job.options_or_default.tags]
        jobs = await self._store.query.get_many(tagged) if tagged else []
        # One that was replayed since comes with its next end.
        found = [job for job in jobs if job is not None and job.ended_at_us == fresh[job.id].ended_at_us]
        return [(_key_of(fresh[job.id]), job) for job in found], page

    def go_on(self, page: JobEvents, keys: dict[bytes, int]) -> None:
        """Moves behind a page. Remembers the keys of ends that may come again, with their instants."""
        self.mark = page.cursor
        if page.is_exact:  # only what the cursor named may come again, until it has
            came = {_key_of(each) for each in page.events}
            self._delivered = {key: at for key, at in self._delivered.items() if page.more and key not in came}
            return
        self._last_us = max([self._last_us, *(each.ended_at_us for each in page.events)])
        known = self._delivered | keys
        if not page.more:
            known = {key: self._last_us if at == _UNKNOWN else at for key, at in known.items()}
        self._delivered = {key: at for key, at in known.items() if at > self._last_us - _REPEATED_US}


class _Streaming(JobOwner, Protocol):
    """The application that the stream belongs to."""

    def _stream_pages(self, tag: str, cursor: str | None) -> AsyncGenerator[list[EndedJob], None]: ...


class TaggedJobMethods:
    """Methods of an application for the jobs of a tag."""

    @requires_loop
    async def count_states(self: JobOwner, where: JobFilter | None = None) -> StateCounts:
        """Counts the jobs that match by state, exactly. With a tag, SQL stores read only its jobs."""
        return await (await self.open_store()).query.count_states(checked_filter(where))

    @requires_loop
    async def wait_for_tag(self: JobOwner, tag: str, *, timeout: float | timedelta | str | None = None) -> StateCounts:
        """Waits until every job of the tag has ended, those included that are added meanwhile; returns their counts.

        Raises WaitTimeout after ``timeout`` (seconds, a timedelta or text like ``30s``; None: never), NotFound if no
        job has the tag.
        """
        store, where = await self.open_store(), JobFilter(tag=check_tag(tag))
        span = None if timeout is None else check_span(timeout, "timeout")
        deadline = None if span is None else self.clock.monotonic() + span.total_seconds()
        unended = _UnendedJobs(store, tag)
        while (counts := await unended.count_if_ended()) is None:
            left = _POLL_SECONDS if deadline is None else deadline - self.clock.monotonic()
            if span is not None and left <= 0:
                counts = await store.query.count_states(where)
                raise WaitTimeout(
                    f"after {span.total_seconds():g} s "
                    f"{counts.total - counts.ended:,} of {counts.total:,} jobs of tag {tag!r} have "
                    "not ended; they go on"
                )
            if unended.ids:
                await store.queueing.wait([f"job:{unended.ids[0]}"], timeout=min(left, _POLL_SECONDS))
        return _check_known(counts, tag)

    async def stream_tag(self: _Streaming, tag: str, *, cursor: str | None = None) -> AsyncGenerator[EndedJob, None]:
        """Yields the jobs of a tag as they end, each end once; ends when all have ended. ``job.cursor``, stored with
        what was done for the job, continues behind it in another process.

        Reads all ends in the store since the first job of the tag was submitted, or since the cursor. Raises NotFound
        if no job has the tag.
        """
        pages = self._stream_pages(tag, cursor)
        try:
            async for page in pages:
                for each in page:
                    yield each
        finally:
            await pages.aclose()

    async def _stream_pages(self: JobOwner, tag: str, cursor: str | None) -> AsyncGenerator[list[EndedJob], None]:
        """Yields the jobs of ``stream_tag`` in lists, as they are read."""
        store = await self.open_store()
        if cursor is None:
            counts = await store.query.count_states(JobFilter(tag=check_tag(tag)))
            position = StreamPosition(_check_known(counts, tag).first_created_us or 0)
        else:
            position = StreamPosition.read(cursor)
        unended, reader = _UnendedJobs(store, check_tag(tag)), _EventReader(store, tag, position)
        is_last = False
        while True:
            # Before the read, which then has every end there is.
            is_last = is_last or await unended.count_if_ended() is not None
            (found, page), before = await reader.read_page(), reader.position
            keys = [key for key, _ in found]
            if found:
                yield [EndedJob(self, job, before, keys[: count + 1]) for count, (_, job) in enumerate(found)]
            reader.go_on(page, {key: job.ended_at_us or 0 for key, job in found})
            if not page.more and is_last:
                return
            if not page.more:
                await store.queueing.wait(["job:*"], timeout=_POLL_SECONDS)
                await _pause()


def _check_known(counts: StateCounts, tag: str) -> StateCounts:
    """Returns the counts. Raises NotFound if there is no job."""
    if not counts.total:
        raise NotFound(f"no job has the tag {tag!r}")
    return counts


async def _pause() -> None:
    """Lets some more jobs end. A blocking caller of SQLite has no event loop."""
    if running_loop() is None:
        time.sleep(_PAUSE)  # noqa: ASYNC251 - the caller blocks anyway
    else:
        await asyncio.sleep(_PAUSE)


_KEY_SIZE = 8


def _key_of(end: JobEvent) -> bytes:
    text = f"{end.job_id}.{end.claims}.{end.ended_at_us}"
    return hashlib.blake2b(text.encode(), digest_size=_KEY_SIZE).digest()


def _split_keys(keys: bytes) -> list[bytes]:
    return [keys[start : start + _KEY_SIZE] for start in range(0, len(keys), _KEY_SIZE)]
