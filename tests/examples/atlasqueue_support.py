"""AtlasQueue in a database and a Redis: real workers as processes, the application to submit with, SQL beside them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import httpx
from redis import Redis as Client

from tests.examples.common import PATIENCE, until
from tests.examples.programs import ROOT, Database, Program, environment
from tests.support.postgres import Postgres
from tests.support.redis import Redis
from tests.support.servers import Port

if TYPE_CHECKING:
    from holdfast import Holdfast, JobHandle

EXAMPLE = ROOT / "examples" / "atlasqueue"
QUEUE, DEAD = "atlasqueue:jobs", "atlasqueue:dlq"
DATABASE = 7
"""Of the Redis that the tests of this process share; no other's."""
HURRIED = {
    "WORKER_POLL_TIMEOUT": "0.3",
    "RETRY_BASE_DELAY_SECONDS": "0.05",
    "RETRY_JITTER_MAX_SECONDS": "0",
    "HANDLER_MODULES": "tests.examples.atlasqueue_handlers",
    "HOLDFAST_GRACE": "0s",
    "WORKER_METRICS_PORT": "0",
}
DUE = """update holdfast.job set run_at = (extract(epoch from now()) * 1000000)::bigint
    where id = any(%s::uuid[]) and state in (1, 3)"""
ENDED = "select count(*) from jobs where id = any(%s::uuid[]) and status = %s"


class Atlasqueue(Database):
    """One database, one list of ids, its workers, and what happened."""

    def __init__(self, server: Postgres, redis: Redis, folder: Path, **variables: str) -> None:
        super().__init__(server)
        self.redis = redis
        self.folder = folder
        self.variables = {
            "DATABASE_URL": self.url,
            "REDIS_URL": redis.url().removesuffix("0") + str(DATABASE),
            **HURRIED,
            **variables,
        }
        self.app = self.application()
        self.command("FLUSHDB")
        asyncio.run(self._migrate())

    def close(self) -> None:
        """Leave database and queue."""
        self.app.sync.close()
        super().close()

    async def _migrate(self) -> None:
        from atlasqueue.tables import migrate

        await migrate(self.application())

    # ── programs ──────────────────────────────────────────────────────────────────────────────────────────────
    def environment(self, **variables: str) -> dict[str, str]:
        """Of its processes: quicker than the settings file says, with the handlers of the tests."""
        own = ["ATLAS", "DATABASE_URL", "REDIS_URL", "JOB_QUEUE_KEY", "DLQ_KEY", "WORKER_", "RETRY_", "LOG_LEVEL"]
        return environment(EXAMPLE, own, **{**self.variables, **variables})

    def application(self, **variables: str) -> Holdfast:
        """The application in this process: who submits needs no handlers."""
        from atlasqueue.config import settings

        from holdfast import Holdfast

        return Holdfast(settings=settings(self.environment(**variables)))

    def program(self, *words: str, **variables: str) -> Program:
        """``python -m …`` started; its lines go to a file of its own."""
        return Program(words, self.folder, self.environment(**variables))

    def run(self, *words: str) -> Program:
        """``python -m atlasqueue …`` run to its end, which must be a good one."""
        program = self.program("atlasqueue", *words)
        assert program.process.wait(60) == 0, program.log()
        return program

    @contextmanager
    def workers(self, number: int = 1, **variables: str) -> Iterator[list[Program]]:
        """That many workers, all at work; they must end well, and write nothing but JSON."""
        with ExitStack() as stack:
            started = [stack.enter_context(self.program("atlasqueue", "worker", **variables)) for _ in range(number)]
            for worker in started:
                until(lambda each=worker: self._is_at_work(each), "the worker's start")
            yield started
        for worker in started:
            lines = [json.loads(line) for line in worker.log().splitlines()]
            assert all(line["event"] and line["level"] for line in lines)

    def _is_at_work(self, worker: Program) -> bool:
        """It has registered; it must not have ended."""
        assert worker.process.poll() is None, worker.log()
        return bool(self.sql("select id from holdfast.worker where pid = %s", worker.process.pid))

    @contextmanager
    def worker(self, **variables: str) -> Iterator[Program]:
        """One worker at work."""
        with self.workers(1, **variables) as (worker,):
            yield worker

    def api(self, **variables: str) -> Api:
        """The HTTP API, served while this lasts."""
        return Api(self, **variables)

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    def post(self, job_type: str = "noop", payload: Mapping[str, Any] | None = None, **options: Any) -> JobHandle[Any]:
        """Submit a job as the API will: always under a key."""
        options = {"key": str(uuid4()), **options}
        handle: JobHandle[Any] = self.app.sync.submit(self.app.draft_job(job_type, payload or {}, **options))
        return handle

    def submit(self, job_type: str = "noop", payload: Mapping[str, Any] | None = None, **options: Any) -> str:
        """The same for a job that must be new; its id."""
        handle = self.post(job_type, payload, **options)
        assert handle.created
        return handle.id

    def submit_many(self, number: int, job_type: str = "noop", payload: Mapping[str, Any] | None = None) -> list[str]:
        """That many at once."""
        drafts = [self.app.draft_job(job_type, payload or {}, key=str(uuid4())) for _ in range(number)]
        return [handle.id for handle in self.app.sync.enqueue_many(drafts)]

    def unheard(self, number: int = 1, job_type: str = "noop", delay: float = 0) -> list[str]:
        """Jobs that were stored and not announced: as when their submitter died in between."""
        job = json.dumps([{"task": job_type, "delay": delay}] * number)
        return [str(row[0]) for row in self.sql("select id::text from holdfast.submit(%s::jsonb)", job)]

    def row(self, job_id: str) -> dict[str, Any]:
        """A row of the table ``jobs``, with instants for its times."""
        names = "id::text, type, payload, status, attempts, max_attempts, run_at, locked_until, lock_owner, last_error"
        (values,) = self.sql(f"select {names}, created_at, updated_at from jobs where id = %s", job_id)  # noqa: S608
        return dict(zip([*names.replace("::text", "").split(", "), "created_at", "updated_at"], values, strict=True))

    def when(self, job_id: str, status: str, attempts: int = 0) -> dict[str, Any]:
        """The row, once the job has this status and at least so many attempts."""

        def reached() -> dict[str, Any] | None:
            row = self.row(job_id)
            return row if row["status"] == status and row["attempts"] >= attempts else None

        return dict(until(reached, f"{job_id} {status} after {attempts} attempts"))

    def all_ended(self, job_ids: Sequence[str], status: str = "succeeded") -> None:
        """Wait until every one of them has."""
        until(lambda: self.value(ENDED, list(job_ids), status) == len(job_ids), f"{len(job_ids)} jobs {status}")

    def when_succeeded(self, number: int) -> None:
        """Wait until so many jobs have succeeded, and no other is left."""
        ended = "select count(*) filter (where status = 'succeeded'), count(*) from jobs"
        until(lambda: self.sql(ended) == [(number, number)], f"the end of {number} jobs")

    def due(self, *job_ids: str) -> None:
        """Have these jobs fall due now, and the workers find out by themselves."""
        self.sql(DUE, list(job_ids))

    # ── Redis ─────────────────────────────────────────────────────────────────────────────────────────────────
    def command(self, *words: Any) -> Any:
        """What Redis answers to one command."""
        with Client(port=self.redis.port, db=DATABASE, socket_timeout=30, decode_responses=True) as client:
            return client.execute_command(*words)

    def listed(self, key: str = QUEUE) -> list[str]:
        """What a list holds."""
        return list(self.command("LRANGE", key, 0, -1))

    def push(self, *job_ids: str) -> None:
        """Say once more that these are ready."""
        self.command("LPUSH", QUEUE, *job_ids)


def starts(workers: Sequence[Program]) -> Counter[str]:
    """How often each job's handler began to run in any of these."""
    return Counter(event["job_id"] for worker in workers for event in worker.events("handler_start"))


def rejected(*workers: Program) -> int:
    """Number of ids that these workers received and could not claim."""
    return sum(event["count"] for worker in workers for event in worker.events("lease_rejected"))


class Api(Program):
    """``python -m atlasqueue api`` on a port of its own, and a client of it."""

    def __init__(self, queue: Atlasqueue, **variables: str) -> None:
        self._port = Port()
        variables["HOLDFAST_API_PORT"] = str(self._port.number)
        super().__init__(["atlasqueue", "api"], queue.folder, queue.environment(**variables))

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self._port.release)
            undo.callback(self.kill)
            self.address = str(self.wait_for_events("api_started")[-1]["address"])
            self.client = httpx.Client(base_url=self.address, timeout=PATIENCE, verify=False)  # noqa: S501 - made up here
            undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.client.close()
        try:
            super().__exit__(*error)
        finally:
            self._port.release()

    def restart(self) -> None:
        """Start it again, after it was killed."""
        started = len(self.events("api_started"))
        self.start()
        self.wait_for_events("api_started", started + 1)

    def post(self, job_type: Any = "noop", payload: Any = None, key: str | None = "", **given: Any) -> httpx.Response:
        """Submit, under a key of its own unless there is one; None: without."""
        headers = {} if key is None else {"Idempotency-Key": key or str(uuid4())}
        body = {"type": job_type, "payload": {} if payload is None else payload, **given}
        return self.client.post("/v1/jobs", json=body, headers=headers)

    def submit(self, job_type: str = "noop", payload: Any = None, **given: Any) -> str:
        """The same for a job that must be new; its id."""
        answer = self.post(job_type, payload, **given)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as the API shows it."""
        answer = self.client.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())
