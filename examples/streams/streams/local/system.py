"""All parts of the system as processes on free ports."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx

from holdfast import ConfigError
from streams.local.processes import Process, free_port
from streams.local.servers import PostgresServer, RedisServer

SERVICES = ("users", "notifications")
EXAMPLE = Path(__file__).parents[2]
INSTANCE = "X-Streams-Instance"
"""Header of all responses: a health check must not be answered by another system on the same port."""
UVICORN = ["--host", "127.0.0.1", "--log-level", "warning", "--timeout-graceful-shutdown", "10"]


class System:
    """PostgreSQL for each service, Redis, the provider, both services with their workers, and the gateway."""

    def __init__(
        self, folder: Path, *, workers: int, gateway_port: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        """``workers``: of each service. ``settings``: environment variables for all parts."""
        self._folder = folder
        self._settings = settings or {}
        self._instance = secrets.token_hex(8)
        self.databases = {name: PostgresServer(name, folder) for name in SERVICES}
        self.redis = RedisServer(folder)
        self._ports = {name: free_port() for name in ("provider", *SERVICES)}
        self._ports["gateway"] = gateway_port or free_port()
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in self._ports.items()}
        targets = {"provider": "streams.provider:site", "gateway": "streams.gateway:site"}
        self.sites = {name: self._site(name, target) for name, target in targets.items()}
        self.sites |= {name: self._site(name, f"streams.{name}.api:site", name) for name in SERVICES}
        self.workers = {name: [self._worker(name, number + 1) for number in range(workers)] for name in SERVICES}

    @property
    def programs(self) -> list[Process]:
        """All processes but the servers."""
        return [*self.sites.values(), *(worker for workers in self.workers.values() for worker in workers)]

    @property
    def processes(self) -> list[Process]:
        """All processes."""
        return [*self.databases.values(), self.redis, *self.programs]

    def service_settings(self, service: str) -> dict[str, str]:
        """Returns the environment variables that are a service's own."""
        return {
            "HOLDFAST_CONFIG": str(EXAMPLE / "streams" / service / "holdfast.toml"),
            "HOLDFAST_URL": self.databases[service].url,
            "HOLDFAST_TRANSPORT_URL": self.redis.url,
        }

    def _environment(self, service: str | None) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(EXAMPLE), os.environ.get("PYTHONPATH")]))
        urls = {f"{name.upper()}_URL": url for name, url in self.urls.items()}
        own = {} if service is None else self.service_settings(service)
        return {**os.environ, **urls, **self._settings, **own, "PYTHONPATH": path}

    def _site(self, name: str, target: str, service: str | None = None) -> Process:
        command = [sys.executable, "-m", "uvicorn", target, "--port", str(self._ports[name]), *UVICORN]
        command += ["--header", f"{INSTANCE}:{self._instance}"]
        return Process(name, command, self._log(name), self._environment(service))

    def _worker(self, service: str, number: int) -> Process:
        name = f"{service}-worker-{number}"
        command = [sys.executable, "-m", "holdfast", "worker", "start"]
        return Process(name, command, self._log(name), self._environment(service))

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    # ── start and stop ────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Starts everything and waits until it is ready."""
        run_in_parallel([self._start_database(name) for name in SERVICES] + [self.redis.start_ready])
        for program in self.programs:
            program.start()
        workers = [worker for service in self.workers.values() for worker in service]
        run_in_parallel(
            [*(partial(self.wait_for_site, name) for name in self.sites), *map(self._wait_for_worker, workers)]
        )

    def _start_database(self, service: str) -> Callable[[], None]:
        def start() -> None:
            self.databases[service].create()
            self.databases[service].start_ready()
            command = [sys.executable, "-m", "streams", "migrate", service]
            environment = self._environment(service)
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ConfigError(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")

        return start

    def wait_for_site(self, name: str) -> None:
        """Waits until this application answers; ConfigError if it ends, as it does if its port is in use."""
        self.sites[name].wait_until(lambda: is_healthy(self.urls[name], self._instance))

    def _wait_for_worker(self, worker: Process) -> Callable[[], None]:
        return lambda: worker.wait_until(lambda: has_started(worker))

    def stop(self) -> None:
        """Ends everything: first the programs, then the servers that they use."""
        run_in_parallel([program.stop for program in self.programs])
        run_in_parallel([server.stop for server in (*self.databases.values(), self.redis)])


def run_in_parallel(calls: Iterable[Callable[[], None]]) -> None:
    """Runs blocking calls side by side; raises the first error when all have ended."""
    with ThreadPoolExecutor(max_workers=16) as threads:
        for running in [threads.submit(call) for call in calls]:
            running.result()


def is_healthy(url: str, instance: str) -> bool:
    """Returns True if the application answers, and belongs to this instance of the system."""
    try:
        answer = httpx.get(f"{url}/health", timeout=5)
    except httpx.TransportError:
        return False
    return answer.is_success and answer.headers.get(INSTANCE) == instance


def has_started(worker: Process) -> bool:
    """Returns True if the worker has said so in its log."""
    return b"worker_started" in worker.log.read_bytes()
