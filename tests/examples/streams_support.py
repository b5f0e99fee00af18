"""The `streams` example on servers of the tests' own: its applications and workers as processes, and a client."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import httpx
from redis import Redis as Client

from holdfast import Holdfast, Job, Settings
from tests.examples.common import PATIENCE, until
from tests.examples.programs import ROOT, Database, Program, environment
from tests.support.plain_http import PLAIN
from tests.support.postgres import Postgres
from tests.support.redis import Redis
from tests.support.servers import Port

EXAMPLE = ROOT / "examples" / "streams"
SERVICES = ("users", "notifications")
GROUP = "holdfast"
OWN_VARIABLES = ("USERS_", "NOTIFICATIONS_", "PROVIDER_", "GUARD_", "SERVICE")
TABLES = """
    create table if not exists executions (job_id uuid, pid int, at timestamptz default clock_timestamp());
    create table if not exists effects (job_id uuid, at timestamptz default clock_timestamp())"""
DUE = """update holdfast.job set run_at = (extract(epoch from now()) * 1000000)::bigint
    where id = %s::uuid and state in (1, 3)"""
DELAYS = "test:delays"
"""Key in Redis: seconds from a token to the provider's answer, of each call by a worker of these tests."""
UNLIMITED = {"capacity": 100_000, "refill": 100_000}
PUBLIC = ("--host", "127.0.0.1", "--log-level", "warning")


def settings_file(service: str) -> Path:
    """Returns the settings file of a service."""
    return EXAMPLE / "streams" / service / "holdfast.toml"


class Site(Program):
    """An application under uvicorn on a port of its own. SIGTERM ends it."""

    def __init__(self, target: str, port: int, folder: Path, variables: Mapping[str, str]) -> None:
        self._url = f"http://127.0.0.1:{port}"
        super().__init__(["uvicorn", target, "--port", str(port), *PUBLIC], folder, variables)

    def wait_healthy(self) -> None:
        """Waits until it answers."""

        def is_healthy() -> bool:
            assert self.process.poll() is None, self.log()
            with suppress(httpx.TransportError):
                return httpx.get(f"{self._url}/health", timeout=PATIENCE, verify=PLAIN).is_success
            return False

        until(is_healthy, f"an answer of {self._url}")

    def stop(self) -> None:
        """Stops it, if it runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE)

    def __exit__(self, *error: Any) -> None:
        self.stop()
        self.kill()


class Service(Database):
    """A service: its database, its jobs, its streams."""

    def __init__(self, name: str, server: Postgres, redis_url: str) -> None:
        super().__init__(server)
        self.name = name
        self.key, self.dead_key = f"{name}:jobs", f"{name}:dead"
        urls = {"url": self.url, "transport_url": redis_url}
        settings = Settings.load(path=settings_file(name), environ={}, max_attempts_limit="unlimited", **urls)
        self.app = Holdfast(settings=settings)
        self.redis = Client.from_url(redis_url, decode_responses=True)

    def close(self) -> None:
        """Closes the connections."""
        self.app.sync.close()
        self.redis.close()
        super().close()

    def submit(self, task: str = "test.job", queue: str = "default", **payload: Any) -> str:
        """Submits a job under a key of its own; returns its id."""
        return str(self.app.sync.enqueue(task, payload, key=str(uuid4()), queue=queue).id)

    def submit_many(self, number: int, queue: str, **payload: Any) -> list[str]:
        """Submits that many jobs at once."""
        drafts = [self.app.draft_job("test.job", payload, key=str(uuid4()), queue=queue) for _ in range(number)]
        return [handle.id for handle in self.app.sync.enqueue_many(drafts)]

    def job(self, job_id: str) -> Job:
        """Returns the job."""
        return self.app.sync.get(job_id)

    def wait_for(self, job_id: str, state: str, attempts: int = 0) -> Job:
        """Returns the job once it has this state and so many attempts."""

        def reached() -> Job | None:
            job = self.job(job_id)
            return job if job.state == state and job.attempts >= attempts else None

        found: Job = until(reached, f"job {job_id} {state} after {attempts} attempts")
        return found

    def all_ended(self, job_ids: Sequence[str], state: str = "succeeded") -> None:
        """Waits until all these jobs have this state."""
        query = "select count(*) from holdfast.jobs where id = any(%s::uuid[]) and state = %s"
        until(lambda: self.value(query, list(job_ids), state) == len(job_ids), f"{len(job_ids)} jobs {state}")

    def make_due(self, job_id: str) -> None:
        """Lets a job that waits for its next attempt start now."""
        self.sql(DUE, job_id)

    def executions(self, *job_ids: str) -> Counter[str]:
        """Returns how often each of these jobs was started."""
        rows = self.sql("select job_id::text from executions where job_id = any(%s::uuid[])", list(job_ids))
        return Counter(job_id for (job_id,) in rows)

    def effects(self, *job_ids: str) -> Counter[str]:
        """Returns how often each of these jobs has had its effect."""
        rows = self.sql("select job_id::text from effects where job_id = any(%s::uuid[])", list(job_ids))
        return Counter(job_id for (job_id,) in rows)

    # ── the stream ────────────────────────────────────────────────────────────────────────────────────────────
    def stream(self, queue: str = "default") -> str:
        """Returns the key of a queue's stream."""
        return self.key if queue == "default" else f"{self.key}:{queue}"

    def entries(self, queue: str = "default") -> list[str]:
        """Returns the ids of the jobs in a stream."""
        return [fields["id"] for _, fields in self.redis.xrange(self.stream(queue))]

    def pending(self, queue: str = "default") -> dict[str, str]:
        """Returns the consumer of each pending job: XPENDING."""
        key, found = self.stream(queue), {}
        if self.redis.exists(key):
            for entry in self.redis.xpending_range(key, GROUP, "-", "+", 1000):
                for _, fields in self.redis.xrange(key, entry["message_id"], entry["message_id"]):
                    found[fields["id"]] = entry["consumer"]
        return found

    def dead_letters(self) -> list[str]:
        """Returns the job ids in the stream of dead letters."""
        return [fields["id"] for _, fields in self.redis.xrange(self.dead_key)]


class Streams:
    """Gateway, provider and both services; workers are started by fixtures and tests."""

    def __init__(self, folder: Path, servers: Mapping[str, Postgres], redis: Redis, database: int = 0) -> None:
        self.folder = folder
        self.redis = redis
        self.redis_url = redis.url().removesuffix("/0") + f"/{database}"
        self.services = {name: Service(name, servers[name], self.redis_url) for name in SERVICES}
        self.users, self.notifications = self.services["users"], self.services["notifications"]
        self.users.redis.flushdb()
        self._ports = {name: Port() for name in (*SERVICES, "gateway", "provider")}
        self.urls = {name: f"http://127.0.0.1:{port.number}" for name, port in self._ports.items()}
        self.sites: dict[str, Site] = {}

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.close)
            migrations = [self._program(["streams", "migrate", name], name) for name in SERVICES]
            for migration in migrations:
                assert migration.process.wait(PATIENCE) == 0, migration.log()
            for service in self.services.values():
                service.sql(TABLES)
            for name in self._ports:
                module = f"streams.{name}.api:site" if name in SERVICES else f"streams.{name}:site"
                variables = self.environment(name if name in SERVICES else "")
                self.sites[name] = Site(module, self._ports[name].number, self.folder, variables)
            for site in self.sites.values():
                site.wait_healthy()
            self.client = httpx.Client(base_url=self.urls["gateway"], timeout=PATIENCE, verify=PLAIN)
            self.call("notifications", "PUT", "/limit", UNLIMITED)
            undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self.client.close()
        self.close()

    def close(self) -> None:
        """Ends everything."""
        for site in self.sites.values():
            site.__exit__()
        for service in self.services.values():
            service.close()
        for port in self._ports.values():
            port.release()

    # ── processes ─────────────────────────────────────────────────────────────────────────────────────────────
    def environment(self, service: str = "", **variables: str) -> dict[str, str]:
        """Returns the environment of a part; with the settings of a service if it belongs to one."""
        given = {f"{name.upper()}_URL": url for name, url in self.urls.items()}
        if service:
            given |= {"HOLDFAST_CONFIG": str(settings_file(service)), "HOLDFAST_URL": self.services[service].url}
            given |= {"HOLDFAST_TRANSPORT_URL": self.redis_url, "HOLDFAST_GRACE": "0s"}
            given |= {"SERVICE": service, "HOLDFAST_APP": "tests.examples.streams_tasks:app"}
        return environment(EXAMPLE, OWN_VARIABLES, **{**given, **variables})

    def _program(self, words: Sequence[str], service: str, **variables: str) -> Program:
        return Program(words, self.folder, self.environment(service, **variables))

    @contextmanager
    def workers(
        self, service: str, number: int = 1, queue: str = "default", **variables: str
    ) -> Iterator[list[Program]]:
        """Runs that many workers of a service for one queue. All of them are ready."""
        with ExitStack() as stack:
            variables = {"HOLDFAST_QUEUES": queue, **variables}
            words = ["holdfast", "worker", "start"]
            started = [self._program(words, service, **variables) for _ in range(number)]
            for worker in started:
                stack.callback(self._end, worker)
            for worker in started:
                worker.says("worker_started")
            yield started

    @staticmethod
    def _end(worker: Program) -> None:
        with suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGCONT)
        worker.process.terminate()
        with suppress(Exception):
            worker.process.wait(PATIENCE)
        worker.kill()

    @contextmanager
    def worker(self, service: str, queue: str = "default", **variables: str) -> Iterator[Program]:
        """Runs one worker."""
        with self.workers(service, 1, queue, **variables) as (worker,):
            yield worker

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────
    def call(self, site: str, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        """Sends a request to an application; the answer must have this status."""
        response = httpx.request(method, self.urls[site] + path, json=body, timeout=PATIENCE, verify=PLAIN)
        assert response.status_code == status, response.text
        return response.json()

    def create_user(self, email: str = "") -> str:
        """Creates a user through the gateway; returns the id of the job.

        A 503 is answered as it asks for, with the same key: on a busy machine a store may be slower than its deadline.
        """
        user = {"email": email or f"{uuid4()}@example.com", "name": "Ada"}
        key = {"Idempotency-Key": str(uuid4())}

        def accepted() -> dict[str, Any] | None:
            response = self.client.post("/users", json=user, headers=key)
            assert response.status_code in (202, 503), response.text
            return dict(response.json()) if response.status_code == 202 else None

        return str(until(accepted, "the submission")["job_id"])

    def status(self, job_id: str) -> str:
        """Returns the status of a job as the gateway shows it."""
        return str(self.client.get(f"/jobs/{job_id}").json()["status"])

    def wait_for_status(self, job_id: str, status: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Returns the job once the gateway shows this status. A failure shows the job as it was seen last."""
        seen: dict[str, Any] = {}

        def reached() -> bool:
            seen.update(self.client.get(f"/jobs/{job_id}").json())
            return seen.get("status") == status

        try:
            until(reached, f"job {job_id} {status}", seconds)
        except AssertionError as error:
            error.add_note(f"The job: {seen}")
            raise
        return seen

    def calls(self, key: str) -> list[dict[str, Any]]:
        """Returns the calls in the provider's log under an idempotency key: the id of a job."""
        return [call for call in self.call("provider", "GET", "/calls") if call["key"] == key]

    @contextmanager
    def provider(self, **behaviour: Any) -> Iterator[None]:
        """Changes how the provider answers while this lasts."""
        self.call("provider", "PUT", "/behaviour", behaviour)
        try:
            yield
        finally:
            self.call("provider", "PUT", "/behaviour", {})
