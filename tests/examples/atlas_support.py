"""Atlas Jobs in a database of its own: real instances as processes, asked over HTTP, and SQL beside them."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from uuid import uuid4

from tests.examples.common import PATIENCE, asked, until
from tests.examples.programs import ROOT, Database, Program, environment
from tests.support.postgres import Postgres
from tests.support.servers import Port

EXAMPLE = ROOT / "examples" / "atlas_jobs"
DUE = """update holdfast.job set run_at = (extract(epoch from now()) * 1000000)::bigint
    where id = any(%s::uuid[]) and state = 3"""
HURRIED = {"HOLDFAST_POLL": "200ms", "HOLDFAST_GRACE": "0s"}


def as_document(document: dict[str, Any]) -> dict[str, Any]:
    """A job as JSON has it, with instants for its times."""
    return {
        name: datetime.fromisoformat(value) if name.endswith("_at") and value is not None else value
        for name, value in document.items()
    }


class Answer(NamedTuple):
    """An answer of the API, and how long it took."""

    status: int
    document: Any
    seconds: float


class Held(BaseHTTPRequestHandler):
    """An external service, which answers when it is allowed to."""

    def do_GET(self) -> None:
        """Wait; then 200. The client may be dead by then."""
        allowed: threading.Event = vars(self.server)["allowed"]
        allowed.wait(PATIENCE)
        with suppress(OSError):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        """Nothing."""


@contextmanager
def held() -> Iterator[tuple[str, threading.Event]]:
    """The payload of an ``api.call`` that lasts until the event is set."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Held)
    vars(server)["allowed"] = allowed = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}), allowed
    finally:
        allowed.set()
        server.shutdown()
        thread.join()
        server.server_close()


class Atlas(Database):
    """One database, its instances, and what happened in it."""

    def __init__(self, server: Postgres, folder: Path) -> None:
        super().__init__(server)
        self.folder = folder

    def row(self, job_id: str) -> dict[str, Any]:
        """A row of the table ``jobs``."""
        return as_document(self.value("select to_jsonb(jobs) from jobs where job_id = %s", job_id))

    def due(self, *job_ids: str) -> None:
        """Have these jobs fall due now, and the workers find out by themselves."""
        self.sql(DUE, list(job_ids))

    def environment(self, **variables: str) -> dict[str, str]:
        """Of an instance: it looks for jobs more often than the settings file says, and ends at once."""
        return environment(EXAMPLE, ["ATLAS_"], HOLDFAST_URL=self.url, **{**HURRIED, **variables})

    def application(self) -> Any:
        """A Holdfast of this process on the same jobs, with Atlas' settings and no tasks."""
        from holdfast import Holdfast, Settings

        return Holdfast(settings=Settings.load(path=EXAMPLE / "holdfast.toml", environ={}, url=self.url))

    @contextmanager
    def running(self, *ids: str, **variables: str) -> Iterator[list[Instance]]:
        """Instances of these names at work, every one of them ready; they must end well."""
        with ExitStack() as stack:
            instances = [stack.enter_context(Instance(self, worker_id, **variables)) for worker_id in ids]
            for instance in instances:
                instance.ready()
            yield instances

    @contextmanager
    def one(self, **variables: str) -> Iterator[Instance]:
        """A single instance at work."""
        with self.running("worker-8080", **variables) as (instance,):
            yield instance


class Instance(Program):
    """``python -m atlas_jobs``, on a port of its own."""

    def __init__(self, atlas: Atlas, worker_id: str, **variables: str) -> None:
        self.atlas = atlas
        self.worker_id = worker_id
        self._port = Port()
        self.port = self._port.number
        self._answers_only = "ATLAS_SCHEDULING_ENABLED" in variables
        named = {"ATLAS_WORKER_ID": worker_id, "SERVER_PORT": str(self.port), **variables}
        super().__init__(["atlas_jobs"], atlas.folder, atlas.environment(**named))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._port.release()

    def ready(self) -> None:
        """Wait until it answers, and runs jobs unless forbidden."""
        until(self._answers, f"an answer of {self.worker_id}")
        if not self._answers_only:
            self.says("worker_started")

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            return self.get("/debug/workers/summary").status == 200
        except OSError:
            return False

    # ── asking ────────────────────────────────────────────────────────────────────────────────────────────────
    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """One request on a connection of its own."""
        address = f"http://127.0.0.1:{self.port}{path}"
        given = {} if body is None else {"Content-Type": "application/json"}
        named = given | {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(address, data=body, method=method, headers=named)
        began = time.monotonic()
        status, text = asked(request)
        return Answer(status, json.loads(text), time.monotonic() - began)

    def get(self, path: str) -> Answer:
        """GET."""
        return self.ask("GET", path)

    def post(self, job_type: str = "demo.sleep", payload: Any = '{"seconds": 0}', **others: Any) -> Answer:
        """POST /jobs; ``key`` goes into the header."""
        key = others.pop("key", None)
        headers = {} if key is None else {"Idempotency_Key": key}
        body = {"job_type": job_type, "payload": payload, **others}
        return self.ask("POST", "/jobs", json.dumps(body).encode(), **headers)

    def submit(self, job_type: str = "demo.sleep", payload: Any = '{"seconds": 0}', **others: Any) -> str:
        """The same for a job that must be new; its id.

        A 503 is answered as it asks for, with the same key: on a busy machine a store may be slower than its deadline.
        """
        others.setdefault("key", str(uuid4()))
        refused = 0

        def submitted() -> str | None:
            nonlocal refused
            answer = self.post(job_type, payload, **others)
            if answer.status == 503:
                refused += 1
                return None
            assert answer.status == 201 or refused, answer
            return str(answer.document["job_id"])

        return str(until(submitted, "the submission"))

    def submit_many(self, count: int, job_type: str, payload: str) -> list[str]:
        """That many at once, from several threads."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda _: self.submit(job_type, payload), range(count)))

    def job(self, job_id: str) -> dict[str, Any]:
        """GET /jobs/{id}."""
        provided = self.get(f"/jobs/{job_id}")
        assert provided.status == 200, provided
        return as_document(provided.document)

    def when(self, job_id: str, status: str, attempts: int = 0) -> dict[str, Any]:
        """The job, once it has this status and at least so many failures."""

        def reached() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["status"] == status and job["attempt_count"] >= attempts else None

        return dict(until(reached, f"{job_id} {status} after {attempts} failures"))

    def all_ended(self, job_ids: Sequence[str]) -> None:
        """Wait until every one of them has succeeded."""
        ended = "select count(*) from jobs where job_id = any(%s::uuid[]) and status = 'SUCCEEDED'"
        until(lambda: self.atlas.value(ended, list(job_ids)) == len(job_ids), f"the end of {len(job_ids)} jobs")

    def starts(self) -> list[str]:
        """The jobs whose handlers it began to run, in their order."""
        return [event["job_id"] for event in self.events("handler_start")]
