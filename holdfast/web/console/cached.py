"""Reads that all pages share, and answers to pages that refresh themselves."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.app import Holdfast
from holdfast.core.error_groups import MAX_READ, ErrorGroup, FailedJob, group_failed_jobs
from holdfast.core.errors import Busy, Conflict, HoldfastError, TooBroad
from holdfast.core.models import Job, JobFilter, JobState, QueueInfo
from holdfast.web.keys import Principal
from holdfast.web.messages import ApiResponse

_MAX_RUNNING = 200
_FRESH_FOR = 2.0  # seconds
_READING_SHARE = 100  # a read that takes a second is good for so many
_T = TypeVar("_T")


class CachedRead(Generic[_T]):
    """A read that all pages share: once in ``fresh_for`` seconds, less often if it takes long, never twice at once."""

    def __init__(
        self, app: Holdfast, read: Callable[[Holdfast], Awaitable[_T]], *, fresh_for: float = _FRESH_FOR
    ) -> None:
        self._app = app
        self._read = read
        self._fresh_for = fresh_for
        self._found: _T | None = None
        self._fresh_until = float("-inf")
        self._changes = 0
        self._reading = asyncio.Lock()
        self._error: HoldfastError | None = None
        self._failed_at = float("-inf")

    async def read_value(self) -> _T:
        """Returns the value, read anew if it is too old; raises the error of a read that failed meanwhile."""
        clock = self._app.clock
        asked = clock.monotonic()
        async with self._reading:
            begun, changes = clock.monotonic(), self._changes
            if self._found is not None and begun < self._fresh_until:
                return self._found
            if self._error is not None and self._failed_at >= asked and begun > asked:
                raise self._error
            try:
                found = await self._read(self._app)
            except HoldfastError as error:
                self._error, self._failed_at = error, clock.monotonic()
                raise
            ended = clock.monotonic()
            if changes == self._changes:
                self._found = found
                self._fresh_until = ended + max(self._fresh_for, _READING_SHARE * (ended - begun))
            return found

    @property
    def known_value(self) -> _T | None:
        """The value that was read last, however old; None before the first read."""
        return self._found

    def forget_value(self) -> None:
        """Reads anew with the next page: something was changed."""
        self._changes += 1
        self._fresh_until = float("-inf")


class RunningJobs(msgspec.Struct, frozen=True):
    """The latest running jobs. ``is_complete``: there are no others."""

    jobs: Sequence[Job]
    is_complete: bool


async def read_queues(app: Holdfast) -> Sequence[QueueInfo]:
    """Reads all queues with their counts."""
    return await app.queues()


async def read_running_jobs(app: Holdfast) -> RunningJobs:
    """Reads the latest running jobs; none if the search takes too long, as on Redis among many jobs."""
    try:
        page = await app.find(JobFilter(states=(JobState.RUNNING,)), limit=_MAX_RUNNING)
    except (TooBroad, Busy):
        return RunningJobs((), False)
    return RunningJobs(page.jobs, page.cursor is None)


async def has_fault_plan(app: Holdfast) -> bool:
    """Reads whether faults are injected; also those of another version, which cannot be read."""
    try:
        return await app.faults.read() is not None
    except Conflict:
        return True


class FailedJobs:
    """Jobs that failed last, grouped once for all keys of the same queues."""

    def __init__(self, jobs: Sequence[FailedJob]) -> None:
        self._jobs = jobs
        self._groups: dict[tuple[str, ...], list[ErrorGroup]] = {}

    def find_groups(self, caller: Principal) -> list[ErrorGroup]:
        """Returns the groups of the jobs that a principal may see."""
        if caller.queues not in self._groups:
            self._groups[caller.queues] = group_failed_jobs(self._jobs, caller.allows_queue)
        return self._groups[caller.queues]


async def read_failed_jobs(app: Holdfast) -> FailedJobs:
    """Reads the jobs that failed last."""
    return FailedJobs(await (await app.open_store()).query.failed_jobs(MAX_READ))


# ── pages that refresh themselves ─────────────────────────────────────────────────────────────────────────────────
_ANSWER_FRESH_FOR = 3.0  # seconds: less than the interval of console.js, so that no page is replaced by an older one
_RENDERING_SHARE = 12  # an answer that takes a second serves for so many; console.js asks after twenty
_MAX_ANSWERS = 100


class _Answer(NamedTuple):
    response: ApiResponse
    fresh_until: float


class SharedRefreshes:
    """Answers by page and rights: each is rendered once for all sessions with these rights."""

    form_token = secrets.token_hex(32)
    """Stands in shared answers for the token of the session."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()

    async def find_answer(
        self, key: Hashable, render: Callable[[], Awaitable[ApiResponse]], form_token: str
    ) -> ApiResponse:
        """Returns the answer for a session, rendered anew if it is too old."""
        begun = self._app.clock.monotonic()
        known = self._answers.get(key)
        if known is None or known.fresh_until <= begun:
            answers = self._answers
            response = await render()
            ended = self._app.clock.monotonic()
            known = _Answer(response, ended + max(_ANSWER_FRESH_FOR, _RENDERING_SHARE * (ended - begun)))
            if response.status == 200:
                answers[key] = known  # of no use if something was changed meanwhile: these were forgotten
                answers.move_to_end(key)
                while len(answers) > _MAX_ANSWERS:
                    answers.popitem(last=False)
        body = known.response.body.replace(self.form_token.encode(), form_token.encode())
        return replace(known.response, body=body)

    def forget_answers(self) -> None:
        """Renders all pages anew: something was changed."""
        self._answers = OrderedDict()
