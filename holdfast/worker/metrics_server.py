"""WorkerHealth of a worker process, and the port on which probes and scrapers ask for it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import NamedTuple

import msgspec

from holdfast.core.errors import ConfigError
from holdfast.core.events import MetricsServed
from holdfast.core.validation import is_loopback
from holdfast.settings.settings import Settings
from holdfast.tasks.command_policy import COMMAND
from holdfast.telemetry.exposition import expose_metrics
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.metrics_process import MetricsPage, MetricsProcess
from holdfast.worker.context import WorkerContext

_JSON = "application/json"


class MetricsServer:
    """While entered, the shift's figures are counted and served, if the settings name a port."""

    def __init__(self, shift: WorkerContext) -> None:
        self._shift = shift
        self._metrics: Metrics | None = None
        self._sidecar: MetricsProcess | None = None

    def __enter__(self) -> None:
        """Raises ConfigError if the port is taken, or reachable from other hosts without a setting for it."""
        shift, settings = self._shift, self._shift.settings
        if settings.metrics_port is None:
            return
        _check_exposure(settings)
        pages = {
            "/": self._figures,
            "/metrics": self._figures,
            "/metrics/": self._figures,
            "/health": self._well,
            "/health/ready": self._well,
            "/health/live": self._alive,
        }
        self._sidecar = MetricsProcess(settings.metrics_host, settings.metrics_port, pages)
        self._metrics = metrics = Metrics(
            shift.events, labels=settings.metrics_labels, tasks=self._tasks, task_field=settings.task_field
        )
        metrics.set_gauge("worker_active_jobs", lambda: len(shift.running))
        metrics.set_gauge("worker_buffered_jobs", lambda: len(shift.buffer))
        metrics.set_gauge("worker_slots", lambda: shift.settings.concurrency)
        metrics.set_gauge("worker_healthy", lambda: float(health_of(shift).well))
        self._sidecar.start()
        shift.emit(MetricsServed(address=self._sidecar.address, worker_id=shift.worker_id))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sidecar is not None:
            self._sidecar.stop()
        if self._metrics is not None:
            self._metrics.close()

    def _tasks(self) -> list[str]:
        """Every task this worker can run."""
        commands = [] if self._shift.settings.commands == "off" else [COMMAND]
        return [*self._shift.app.registry.task_names(), *commands]

    # ── pages: made in the sidecar's thread ───────────────────────────────────────────────────────────────────────
    def _figures(self, accept: str) -> MetricsPage:
        assert self._metrics is not None  # noqa: S101 - made before the sidecar starts
        body, media = expose_metrics(self._metrics.read(), prefix=self._shift.settings.metrics_prefix, accept=accept)
        return MetricsPage(200, body, media)

    def _well(self, _accept: str) -> MetricsPage:
        health = health_of(self._shift)
        return self._health_page(health, good=health.well)

    def _alive(self, _accept: str) -> MetricsPage:
        health = health_of(self._shift)
        return self._health_page(health, good=health.live)

    def _health_page(self, health: WorkerHealth, *, good: bool) -> MetricsPage:
        said = {
            "status": "ok" if good else health.status,
            "service": "holdfast-worker",
            "worker": self._shift.worker_id,
        }
        return MetricsPage(200 if good else 503, msgspec.json.encode(said), _JSON)


def _check_exposure(settings: Settings) -> None:
    if not settings.metrics_open and not is_loopback(settings.metrics_host):
        raise ConfigError(
            f"metrics_host: {settings.metrics_host} can be reached by others, and this port asks for no key, though it "
            "names tasks and queues: listen on 127.0.0.1, or set metrics_open if they may read it, or if something "
            "before it decides who reaches it"
        )


class WorkerHealth(NamedTuple):
    """``live``: its event loop turns. ``well``: it also fetches jobs, or knows that there are none."""

    live: bool
    well: bool
    status: str
    """``ok``, or what is not."""


def health_of(shift: WorkerContext) -> WorkerHealth:
    """As it is now. From any thread."""
    settings, now = shift.settings, shift.clock.monotonic()
    within = settings.health_within.total_seconds()
    live = time.monotonic() - shift.heard_at <= within  # the loop's health is a matter of real time
    if shift.stopping.is_set():
        return WorkerHealth(live, False, "stopping")
    if not live:
        return WorkerHealth(False, False, "blocked")
    if shift.fetched_at is None:
        return WorkerHealth(True, False, "starting")
    if shift.sated:  # its hands are full: then it is well as long as it renews what it holds
        well = now - max(shift.renewed_at, shift.fetched_at) <= within + settings.beat.total_seconds()
    else:
        well = now - shift.fetched_at <= within + settings.poll.total_seconds()
    return WorkerHealth(True, well, "ok" if well else "store_away")
