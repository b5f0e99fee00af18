"""Delayed Queue on a Redis of the tests' own: real servers and workers as processes, and redis-cli's view of them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import Redis as Client

from holdfast import Holdfast, Settings
from holdfast.core.ids import as_ulid
from holdfast.core.models import to_datetime
from holdfast.stores import open_store
from holdfast.stores.base import Store
from tests.examples import programs
from tests.examples.common import asked, until
from tests.examples.programs import ROOT
from tests.support.redis import Redis
from tests.support.servers import Port

EXAMPLE = ROOT / "examples" / "delayed_queue"
SETTINGS = EXAMPLE / "holdfast.toml"
QUERY = urlsplit(Settings.load(path=SETTINGS, environ={}).url).query
DATABASE = 9
"""Of the shared server: no other test looks at it, so that what stands there is this example's."""
LEADER = ["--role", "leader"]
SECOND = 1_000_000
"""In the microseconds that instants are counted in."""


def lateness(jobs: Sequence[dict[str, str]]) -> list[float]:
    """Seconds from the due time of each until it was picked up; none of them may have been early."""
    late = [int(job["pickupTime"]) - int(job["dueTime"]) for job in jobs]
    assert min(late) >= 0
    return [each / SECOND for each in late]


class Program(programs.Program):
    """One process of the example's."""

    def starts(self) -> list[str]:
        """The jobs whose callbacks it began to run, in their order, by ULID."""
        return [as_ulid(event["job_id"]) for event in self.events("handler_start")]


class Delayed:
    """One database of one Redis, what runs on it, and what its keys hold."""

    def __init__(self, server: Redis, folder: Path, database: int = DATABASE) -> None:
        self.port = server.port
        self.folder = folder
        self.url = f"redis://127.0.0.1:{server.port}/{database}?{QUERY}"
        self.client = Client(port=server.port, db=database, protocol=2, decode_responses=True)
        self.client.flushdb()
        self.app = Holdfast(settings=Settings.load(path=SETTINGS, environ={}, url=self.url))
        self._ports = ExitStack()

    def close(self) -> None:
        """Leave nothing."""
        self.app.sync.close()
        self.client.flushdb()
        self.client.close()
        self._ports.close()

    # ── processes ─────────────────────────────────────────────────────────────────────────────────────────────
    def environment(self, **variables: str) -> dict[str, str]:
        """Of a process on this database; its folder is the test's, its settings file the example's."""
        ours = ("JOB_COUNT", "TIME_OFFSET_SEC", "API_URL", "SERVER_PORT")
        given = {"HOLDFAST_CONFIG": str(SETTINGS), "HOLDFAST_URL": self.url, "HOLDFAST_GRACE": "0s"}
        return programs.environment(EXAMPLE, ours, **{**given, **variables})

    @contextmanager
    def workers(self, *arguments: Sequence[str], **variables: str) -> Iterator[list[Program]]:
        """One worker for each of these arguments (none: as the settings say), all of them ready."""
        environment = self.environment(**variables)
        with ExitStack() as stack:
            started = [
                stack.enter_context(Program(["holdfast", "worker", "start", *each], self.folder, environment))
                for each in arguments
            ]
            for worker in started:
                worker.says("worker_started")
            yield started

    @contextmanager
    def servers(self, count: int) -> Iterator[list[Server]]:
        """So many HTTP servers, all of them answering."""
        with ExitStack() as stack:
            servers = [Server(self.free_port()) for _ in range(count)]
            for server in servers:
                environment = self.environment(SERVER_PORT=str(server.port))
                program = Program(["delayed_queue", "server"], self.folder, environment)
                server.program = stack.enter_context(program)
            for server in servers:
                server.program.says("api_started")
            yield servers

    def free_port(self) -> int:
        """A port of this test's own."""
        port = Port()
        self._ports.callback(port.release)
        return port.number

    def overheard(self, seconds: float) -> list[str]:
        """What clients send to this database for so long, a line for each command; what scripts do is left out."""
        with Client(port=self.port, protocol=2) as listener, listener.monitor() as monitor:
            time.sleep(seconds)
            self.client.echo("over")
            heard = list(takewhile(lambda each: each["command"] != "ECHO over", monitor.listen()))
        return [each["command"] for each in heard if each["db"] == DATABASE and each["client_type"] != "lua"]

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    def now(self) -> int:
        """Redis' clock."""
        seconds, rest = self.client.time()
        return int(seconds) * SECOND + int(rest)

    def submit(self, *dues: int, seconds: float = 0.0) -> list[str]:
        """A job for each of these moments; their ULIDs."""
        drafts = [
            self.app.draft_job("callback", {"payload": {"seconds": seconds}}, run_at=to_datetime(due)) for due in dues
        ]
        return [as_ulid(handle.id) for handle in self.app.sync.enqueue_many(drafts)]

    def jobs(self, job_ids: Sequence[str]) -> list[dict[str, str]]:
        """The hashes of jobs."""
        with self.client.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hgetall(f"delayed-queue:job:{job_id}")
            return list(pipeline.execute())

    def job(self, job_id: str) -> dict[str, str]:
        """A job's hash."""
        return self.jobs([job_id])[0]

    def all_ended(self, job_ids: Sequence[str]) -> list[dict[str, str]]:
        """The hashes of these jobs, once every one has succeeded."""

        def ended() -> list[dict[str, str]] | None:
            jobs = self.jobs(job_ids)
            return jobs if all(job.get("state") == "succeeded" for job in jobs) else None

        return list(until(ended, f"the end of {len(job_ids)} jobs"))

    def claims(self, job_id: str) -> int:
        """How often a worker took a job; each time is an attempt."""
        job = self.app.sync.get(job_id)
        assert job.attempts == job.claims
        return int(job.claims)

    def places(self) -> dict[str, list[str]]:
        """The ids in each of the three structures, at one moment."""
        with self.client.pipeline(transaction=True) as pipeline:
            pipeline.zrange("delayed-queue:jobs", 0, -1).lrange("delayed-queue:dueJobs", 0, -1)
            pipeline.zrange("delayed-queue:unackedJobs", 0, -1)
            return dict(zip(("jobs", "dueJobs", "unackedJobs"), pipeline.execute(), strict=True))

    def place(self, job_id: str) -> list[str]:
        """Where a job's id stands."""
        return [name for name, ids in self.places().items() for each in ids if each == job_id]

    @contextmanager
    def store(self, now: Callable[[], int] | None = None) -> Iterator[BlockingStore]:
        """The store itself, without an application; with a clock of the test's own, if it has one."""
        store = open_store(self.url, now=now)
        store.blocking(store.open())
        try:
            yield BlockingStore(store)
        finally:
            store.blocking(store.close())


class BlockingStore:
    """A store's families for a test without an event loop."""

    def __init__(self, store: Store) -> None:
        self.queueing = Blocking(store, "queueing")
        self.maintenance = Blocking(store, "maintenance")
        self.query = Blocking(store, "query")


class Blocking:
    """A family whose verbs run without an event loop."""

    def __init__(self, store: Store, family: str) -> None:
        self._store = store
        self._family = family

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return lambda *values, **options: self._store.blocking(self._call(verb, *values, **options))

    async def _call(self, verb: str, *values: Any, **options: Any) -> Any:
        return await getattr(getattr(self._store, self._family), verb)(*values, **options)


class Server:
    """An HTTP server of the example's."""

    program: Program

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """GET, or POST where there is a body; status and document."""
        text = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        status, answer = asked(urllib.request.Request(self.url + path, text, headers))  # noqa: S310 - ours, on this host
        return status, json.loads(answer)

    def schedule(self, payload: Any, **when: float) -> str:
        """The id of a new job."""
        status, document = self.ask("/jobs", {"payload": payload, **when})
        assert status == 200, document
        return str(document["jobId"])
