"""Moves jobs from a peer's store into Holdfast, so that none is lost and none runs twice.

For each page of jobs:

1. take: the peer's server moves them aside in one step each, if they still wait there. Its workers no longer see them.
2. submit: under keys made of the peer's ids; acknowledged when they are on disk.
3. drop: they are removed from aside.

After a crash between these steps the next import begins with the jobs that are aside. Their keys make it harmless to
submit them again, also while the importer that took them still runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from holdfast.app import Holdfast
from holdfast.core.errors import ConfigError, HoldfastError, Invalid, QueueFull, Unavailable
from holdfast.core.fault_points import fault_point
from holdfast.core.limits import LimitTable
from holdfast.core.models import NewJob
from holdfast.core.validation import did_you_mean, mask_url

PAGE = 100
"""Jobs that are read, taken and submitted together: at most so many are aside when an import is killed."""
_ANSWER_SECONDS = 30  # older versions of redis-py wait for a silent server for ever
_UNKNOWN = "the application has no task"
_UNFIT_META = "its meta is not what JSON keeps unchanged, with the job's id, in 16 KiB and 64 levels"
_KEY_FOR = "30d"  # longer than a job that has ended is kept: a repeated import still finds its key


class Unmovable(Exception):
    """The reason why a job stays with the peer."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A list, registry or hash of the peer's store."""

    kind: str
    queue: str
    key: str


@dataclass(frozen=True, slots=True)
class PeerJob:
    """A job of the peer that can be moved."""

    id: str
    task: str
    state: str
    key: str
    """Idempotency key of the job in Holdfast."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    queue: str | None
    """None: the queue of the task."""
    source: Any
    """Arguments with which the peer takes and drops it."""
    priority: int = 0
    run_at: datetime | None = None
    expires: datetime | None = None
    meta: Any = None
    """Metadata that RQ keeps for the handler; None without."""


@dataclass(frozen=True, slots=True)
class LeftJob:
    """A job that stays with the peer."""

    task: str
    state: str
    reason: str


class Peer(Protocol):
    """A store of another queue."""

    @property
    def name(self) -> str: ...

    def list_queues(self) -> list[str]:
        """Returns the names of the peer's queues, as far as it has noted them."""

    def list_lanes(self) -> list[Lane]:
        """Returns the lists in which jobs wait, in the order in which they are moved."""

    def read_page(self, lane: Lane, offset: int, count: int) -> list[PeerJob | LeftJob]:
        """Returns a page of a lane, the next job first."""

    def read_aside(self, *, drops_expired: bool) -> list[PeerJob | LeftJob]:
        """Returns the jobs that an import has taken and not dropped. ``drops_expired``: removes the expired ones."""

    def take_jobs(self, lane: Lane, jobs: Sequence[PeerJob]) -> list[bool]:
        """Moves jobs aside, each atomically; True if it is aside then.

        That is so as well if an earlier call moved it, whose answer was lost, or another import.
        """

    def drop_jobs(self, jobs: Sequence[PeerJob]) -> None:
        """Removes jobs from aside."""


@dataclass
class ImportSummary:
    """Result of an import, or of a dry run."""

    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of jobs by task and state; in a dry run, of those that would be moved."""
    already_moved: int = 0
    """Number of jobs that were moved before, or whose task is ``unique``: a job with their key was there."""
    left: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of jobs by task, state and reason."""

    @property
    def is_complete(self) -> bool:
        """Returns True if only failed jobs are left with the peer."""
        return all(state == "failed" for _, state, _ in self.left)

    def list_left(self) -> list[tuple[tuple[str, str, str], int]]:
        """Returns the counts of ``left``: unknown tasks first, then the most frequent."""
        return sorted(self.left.items(), key=lambda item: (_UNKNOWN not in item[0][2], -item[1], item[0]))


class Importer:
    """Moves the jobs of a peer into a store, in one run."""

    def __init__(
        self, app: Holdfast, peer: Peer, *, names: Mapping[str, str], allow_unknown: bool = False, dry_run: bool = False
    ) -> None:
        """``names``: the task here for a name of the peer, if they differ."""
        self._app = app
        self._peer = peer
        self._names = names
        self._allow_unknown = allow_unknown
        self._dry_run = dry_run
        self.summary = ImportSummary()
        self._full: dict[str, str] = {}  # why a queue or bucket here took no job: no more are taken for it
        self._limits = LimitTable()  # that say which jobs are of a full bucket

    def run(self) -> ImportSummary:
        """Moves until a pass over the peer's lanes finds nothing to move; a dry run is one pass."""
        while self._pass_lanes() and not self._dry_run:
            self.summary.left.clear()
        return self.summary

    def _pass_lanes(self) -> int:
        aside = self._peer.read_aside(drops_expired=not self._dry_run)
        moved = self._submit(self._draft_page(aside, is_aside=True))
        for lane in self._peer.list_lanes():
            offset = 0
            while page := self._peer.read_page(lane, offset, PAGE):
                taken = self._move(lane, self._draft_page(page))
                offset += len(page) - taken
                moved += taken
                if len(page) < PAGE:
                    break
        return moved

    def _draft_page(self, page: Sequence[PeerJob | LeftJob], *, is_aside: bool = False) -> list[tuple[PeerJob, NewJob]]:
        jobs, reason_prefix = list[tuple[PeerJob, NewJob]](), "it is aside: " if is_aside else ""
        for found in page:
            try:
                if isinstance(found, LeftJob):
                    raise Unmovable(found.reason)
                new = self._draft(found)
                depths = (
                    dict(self._limits.find_depths(new, self._app._as_stored)) if self._full and not is_aside else {}
                )
                if full := self._full.keys() & depths:
                    raise Unmovable(f"another was refused: {self._full[min(full)]}")
                jobs.append((found, new))
            except (Unmovable, Invalid) as error:
                reason = _UNFIT_META if isinstance(error, Invalid) and error.field == "metadata" else str(error)
                self.summary.left[found.task, found.state, reason_prefix + reason] += 1
        return jobs

    def _draft(self, job: PeerJob) -> NewJob:
        name = self._names.get(job.task, job.task)
        task = self._app.registry.get(name)
        payload: Any = job.kwargs
        if task is not None:
            payload = task.encode(job.args, dict(job.kwargs), self._app.settings.payload_limit)
        elif not self._allow_unknown:
            known = self._app.registry.task_names()
            raise Unmovable(f"{_UNKNOWN} {name!r}; register it, or give --map OLD=NEW{did_you_mean(name, known)}")
        elif job.args:
            raise Unmovable("its positional arguments need the signature of the task: register it")
        return self._app.draft_job(
            name,
            payload,
            queue=job.queue,
            priority=job.priority or None,
            run_at=job.run_at,
            expires=job.expires,
            key=job.key,
            key_for=_KEY_FOR,
            metadata={f"{self._peer.name}_id": job.id} | ({f"{self._peer.name}_meta": job.meta} if job.meta else {}),
        )

    def _move(self, lane: Lane, jobs: Sequence[tuple[PeerJob, NewJob]]) -> int:
        """Takes and submits jobs; returns how many were taken, and so left their lane."""
        if self._dry_run or not jobs:
            return self._submit(jobs)
        answers = self._peer.take_jobs(lane, [found for found, _ in jobs])
        taken = [job for job, is_taken in zip(jobs, answers, strict=True) if is_taken]
        fault_point("import.taken")
        self._submit(taken)
        return len(taken)

    def _submit(self, jobs: Sequence[tuple[PeerJob, NewJob]]) -> int:
        """Submits jobs that are aside, and drops them there; returns their number. A dry run counts them."""
        if self._dry_run or not jobs:
            self.summary.moved.update((new.task, found.state) for found, new in jobs)
            return 0
        try:
            handles = self._app.sync.enqueue_many([new for _, new in jobs], batch_size=len(jobs))
        except (Invalid, QueueFull) as error:
            if len(jobs) > 1:
                middle = len(jobs) // 2
                return self._submit(jobs[:middle]) + self._submit(jobs[middle:])
            found, _ = jobs[0]
            if isinstance(error, QueueFull):
                self._full[error.bounded] = str(error)
                self._limits = LimitTable(self._app.limits.sync.find_all())
            self.summary.left[found.task, found.state, f"it is aside, and was refused: {error}"] += 1
            return 0
        fault_point("import.submitted")
        self._peer.drop_jobs([found for found, _ in jobs])
        stored = [job for job, handle in zip(jobs, handles, strict=True) if handle.created]
        self.summary.moved.update((new.task, found.state) for found, new in stored)
        self.summary.already_moved += len(jobs) - len(stored)
        return len(jobs)


class ImportStopped(HoldfastError):
    """An error or a signal stopped an import."""

    def __init__(self, reason: object, summary: ImportSummary, exit_code: int) -> None:
        done = sum(summary.moved.values()) + summary.already_moved
        super().__init__(
            f"{reason}; {done:,} jobs are moved; run the import again: it continues where this one stopped"
        )
        self.exit_code = exit_code


@contextmanager
def open_peer(url: str) -> Iterator[Any]:
    """Yields a client of redis-py that answers bytes; its errors become errors of Holdfast."""
    try:
        from redis import Redis, exceptions

        from holdfast.stores.connections.redis_url import parse_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"an import needs {error.name}; pip install 'holdfast[redis]'") from None
    server, _ = parse_server(url, field="peer")
    if server.kind != "direct":
        raise ConfigError(f"peer: {mask_url(url)!r} is not valid; give one server, such as redis://host:6379/0")
    client = Redis.from_url(
        url.replace("valkey", "redis", 1) if url.startswith("valkey") else url,
        protocol=2,
        socket_timeout=_ANSWER_SECONDS,
        socket_connect_timeout=_ANSWER_SECONDS,
    )
    try:
        with client:
            client.ping()
            yield client
    except exceptions.RedisError as error:
        outages, refusals = (exceptions.ConnectionError, exceptions.TimeoutError), exceptions.AuthenticationError
        is_outage = isinstance(error, outages) and not isinstance(error, refusals)
        raise (Unavailable if is_outage else ConfigError)(f"{mask_url(url)}: {error}") from error
