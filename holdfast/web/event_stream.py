"""Following jobs: a stream of server-sent events. docs/events.md has its promises."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from holdfast.core.errors import HoldfastError, Invalid
from holdfast.core.ids import parse_id
from holdfast.core.models import JobEvent, JobEvents, JobState
from holdfast.tasks.codec import RawText
from holdfast.views.documents import ID, Counted, Instant, JobId, QueueName, TaskName
from holdfast.views.formatting import format_timestamp
from holdfast.web.event_broadcast import EventBroadcaster, SeenEvents, Subscriber
from holdfast.web.fields import FILTERS, QUEUE, Field, ValueType, any_value, choice_value
from holdfast.web.messages import ApiResponse, Streamed
from holdfast.web.routing import Operation, RequestContext
from holdfast.web.routing import ResponseSpec as Answered

KINDS = ("succeeded", "failed", "dead", "cancelled")
"""Names of the events in the stream."""
_RETRY_MS = 2000
_KEEPALIVE = 15.0  # seconds between keep-alive comments
_KEY_CHECK_INTERVAL = 4.0  # seconds between checks that the key is still valid
_encode = msgspec.json.Encoder().encode


class EventDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a job: its end, or a failed attempt that another will follow."""

    id: JobId
    task: TaskName
    queue: QueueName
    state: Annotated[JobState, Meta(description="Where it left the job.")]
    attempt: Counted
    worker: Annotated[str | None, Meta(description="Who ran it.")]
    reason: str | None
    error: Annotated[str | None, Meta(description="null, too, where settings hide something.")]
    at: Instant
    seconds: Annotated[float | None, Meta(description="How long the attempt took.")]


async def stream_events(call: RequestContext) -> ApiResponse:
    """Sends events until the client disconnects."""
    if call.request.method == "HEAD":
        return ApiResponse(200, media=_MEDIA)
    for queue in call.query.get("queue", ()):
        call.caller.check_queue(queue)
    after = call.request.headers.get(b"last-event-id")
    name = call.broadcasters.add_stream(call.caller)
    call.request.at_end.append(partial(call.broadcasters.remove_stream, name))
    stream = _Stream(call, call.broadcasters.for_running_loop(), name)
    try:
        begin = await stream.events_after(after.decode("latin-1") if after else None)
    except Invalid as error:
        raise Invalid("Last-Event-ID", RawText(f"{len(after or b''):,} characters"), error.remedy) from None
    chunk_timeout = 2 * call.app.settings.body_timeout.total_seconds()
    return Streamed(200, media=_MEDIA, chunks=_chunks(stream, begin), chunk_timeout=chunk_timeout)


_MEDIA = b"text/event-stream; charset=utf-8"


async def _chunks(stream: _Stream, begin: JobEvents) -> AsyncGenerator[bytes, None]:
    try:
        yield f"retry: {_RETRY_MS}\n\n".encode()
        async for chunk in stream.event_chunks(begin):
            yield chunk
    except HoldfastError:
        return  # the store is away: the client reconnects and resumes


class _Stream:
    """A client's stream."""

    def __init__(self, call: RequestContext, broadcaster: EventBroadcaster, name: str) -> None:
        self._call = call
        self._broadcaster = broadcaster
        self._name = name
        self._ends_at = call.app.clock.monotonic() + call.app.settings.event_stream_for.total_seconds()
        self._sent = SeenEvents()
        self._kinds: Collection[str] = call.query.get("event", KINDS)
        self._queues: Collection[str] = call.query.get("queue", ())
        self._tasks: Collection[str] = call.query.get("task", ())
        self._jobs: Collection[str] = call.query.get("job_id", ())
        self._hides = bool(call.app.settings.redacted)

    async def event_chunks(self, page: JobEvents) -> AsyncIterator[bytes]:
        """Yields missed events, then new events."""
        yield self._render(page) or _position(page.public_cursor)
        while page.more and self._is_open():
            page = await self.events_after(page.cursor)
            yield self._render(page) or _position(page.public_cursor)
        async with self._broadcaster.subscribe_from() as subscriber:
            more = True
            while more and self._is_open():  # once more: events before the subscription
                page = await self.events_after(page.cursor)
                more = page.more
                yield self._render(page)
            async for chunk in self._live(subscriber):
                yield chunk

    async def _live(self, subscriber: Subscriber) -> AsyncIterator[bytes]:
        """Yields new events until the client is too slow for them."""
        clock = self._call.app.clock
        keepalive_at = clock.monotonic() + _KEEPALIVE
        while not subscriber.is_late and self._is_open():
            page = await subscriber.next(min(_KEY_CHECK_INTERVAL, self._ends_at - clock.monotonic()))
            if page is not None and (rendered := self._render(page)):
                yield rendered
                keepalive_at = clock.monotonic() + _KEEPALIVE
            elif clock.monotonic() >= keepalive_at and not subscriber.is_late:
                latest = self._broadcaster if page is None else page
                yield b": still here\n" + _position(latest.public_cursor)
                keepalive_at = clock.monotonic() + _KEEPALIVE

    async def events_after(self, cursor: str | None) -> JobEvents:
        """Returns the page of events after a cursor."""
        return await self._broadcaster.read_missed(self._name, cursor)

    def _is_open(self) -> bool:
        """Returns True if the stream's time is not over and its key is still valid."""
        return self._call.app.clock.monotonic() < self._ends_at and self._call.is_still_authorized()

    def _render(self, page: JobEvents) -> bytes:
        """Renders the events of a page, the last one with the position to resume from; empty if none matches."""
        parts = [_GAP] if page.gap else []
        parts += [self._event(each) for each in self._sent.filter_new(page.events) if self._matches(each)]
        if not parts:
            return b""
        return b"".join([*parts[:-1], b"id: " + page.public_cursor.encode() + b"\n", parts[-1]])

    def _matches(self, ending: JobEvent) -> bool:
        return (
            _kind(ending) in self._kinds
            and (not self._queues or ending.queue in self._queues)
            and (not self._tasks or ending.task in self._tasks)
            and (not self._jobs or ending.job_id in self._jobs)
            and self._call.caller.allows_queue(ending.queue)
        )

    def _event(self, ending: JobEvent) -> bytes:
        document = event_document(ending, hides=self._hides)
        return b"event: " + _kind(ending).encode() + b"\ndata: " + _encode(document) + b"\n\n"


_GAP = b'event: gap\ndata: {"detail": "some of what happened since that id is not known any more"}\n\n'


def _position(public_cursor: str) -> bytes:
    """Returns an event that only carries the position."""
    return b"id: " + public_cursor.encode() + b"\n\n"


def _kind(ending: JobEvent) -> str:
    return ending.state.value if ending.state.value in KINDS else "failed"


def event_document(ending: JobEvent, *, hides: bool) -> EventDocument:
    """An event as it is sent."""
    began = ending.started_at_us
    return EventDocument(
        id=ending.job_id,
        task=ending.task,
        queue=ending.queue,
        state=ending.state,
        attempt=ending.attempt,
        worker=ending.worker,
        reason=ending.reason,
        error=None if hides else ending.error,
        at=format_timestamp(ending.ended_at_us),
        seconds=None if began is None else max(0, ending.ended_at_us - began) / 1e6,
    )


def _job_id(value: Any, field: str) -> str:
    found = parse_id(value)
    if found is None:
        raise Invalid(field, value, "give a job's id")
    return found


_ID = "^(?:[0-9A-Fa-f]{8}-?(?:[0-9A-Fa-f]{4}-?){3}[0-9A-Fa-f]{12}|[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25})$"
_TASK = next(field for field in FILTERS if field.name == "task")
_LAST = Field(
    "Last-Event-ID",
    ValueType({"type": "string", "maxLength": 8000}, any_value),
    "The `id` of the last event: go on behind it.",
)
_EXAMPLE = {
    "id": ID,
    "task": "email.send",
    "queue": "default",
    "state": "succeeded",
    "attempt": 1,
    "worker": "w-7c1f",
    "reason": None,
    "error": None,
    "at": "2030-01-31T08:00:00.000000Z",
    "seconds": 0.25,
}

OPERATIONS = (
    Operation(
        name="stream_events",
        method="GET",
        path="/v1/events",
        scope="read",
        group="Events",
        summary="Follow what happens: a stream of server-sent events",
        doc="Endings and failed attempts, as they come; the data of each is a document like this one. "
        "[Following what happens](events.md) says what is promised.",
        handler=stream_events,
        query=(
            Field(
                "event",
                choice_value("EventKind", *KINDS),
                "Events of this kind; several: of any of them.",
                example="dead",
                many=True,
            ),
            msgspec.structs.replace(QUEUE, many=True, doc="Jobs of this queue; several: of any of them."),
            _TASK,
            Field(
                "job_id",
                ValueType({"type": "string", "pattern": _ID}, _job_id),
                "This job; several: any of them.",
                many=True,
            ),
        ),
        headers=(_LAST,),
        answers={200: Answered(EventDocument, "Events, until either side ends the stream.", _EXAMPLE, stream=True)},
        refusals=(429,),
    ),
)
