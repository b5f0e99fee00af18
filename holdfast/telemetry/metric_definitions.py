"""Every metric there is. Names as Prometheus has them: base units, ``_total`` on counters, and the prefix of the
settings before each. ``docs/metrics.md`` shows this table."""

from __future__ import annotations

from holdfast.telemetry.metric_types import Family

_QUICK = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0, 86400.0)
_SIZES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)

FAMILIES = (
    # ── jobs: those a process submitted, and those a worker ran ──
    Family(
        name="jobs_submitted_total",
        kind="counter",
        labels=("task",),
        place="both",
        doc="Jobs this process submitted that are new.",
    ),
    Family(
        name="jobs_idempotent_total",
        kind="counter",
        labels=("task",),
        place="both",
        doc="Submissions whose key or id already stood for a job.",
    ),
    Family(
        name="jobs_succeeded_total",
        kind="counter",
        labels=("task",),
        doc="Jobs that ended in success, and that is stored.",
    ),
    Family(name="jobs_failed_total", kind="counter", labels=("task",), doc="Attempts that failed and will be retried."),
    Family(name="jobs_dead_total", kind="counter", labels=("task",), doc="Jobs that became dead letters."),
    Family(
        name="jobs_deferred_total",
        kind="counter",
        labels=("task", "reason"),
        doc="Jobs given back for a worker that can run them: `no_handler` or `payload` says why this one could not.",
    ),
    Family(
        name="jobs_retried_total",
        kind="counter",
        doc="Jobs taken again after an attempt that failed or was lost.",
    ),
    Family(
        name="jobs_recovered_total", kind="counter", doc="Jobs whose lease had ended unsettled: their worker was gone."
    ),
    Family(name="jobs_pruned_total", kind="counter", doc="Ended jobs deleted because their time was over."),
    Family(
        name="job_duration_seconds",
        kind="histogram",
        labels=("task", "outcome"),
        bounds=_LONG,
        doc="How long handlers ran, by what came of it: succeeded, failed, dead.",
    ),
    Family(
        name="job_lateness_seconds",
        kind="histogram",
        labels=("queue",),
        bounds=_LONG,
        doc="How long jobs could have been taken before they were. Its count is the jobs taken of each queue.",
    ),
    # ── leases ──
    Family(name="lease_acquired_total", kind="counter", doc="Jobs this worker took."),
    Family(
        name="lease_rejected_total", kind="counter", doc="Ids a transport delivered that could not be claimed any more."
    ),
    Family(
        name="transport_malformed_total",
        kind="counter",
        place="both",
        doc="Messages without a job id that a transport delivered.",
    ),
    Family(name="lease_lost_total", kind="counter", doc="Settlements that came too late: another worker had the job."),
    # ── the worker itself ──
    Family(name="worker_active_jobs", kind="gauge", doc="Handlers that run now."),
    Family(name="worker_buffered_jobs", kind="gauge", doc="Jobs this worker has claimed and not yet begun."),
    Family(name="worker_slots", kind="gauge", doc="Handlers that may run at once: its concurrency."),
    Family(
        name="worker_healthy", kind="gauge", doc="1 while it fetches, or knows that there is nothing to fetch, else 0."
    ),
    Family(name="settle_batch_jobs", kind="histogram", bounds=_SIZES, doc="Jobs that were settled together."),
    Family(
        name="loop_lag_seconds",
        kind="histogram",
        bounds=_QUICK,
        place="both",
        doc="How long the event loop took to answer, asked once a second.",
    ),
    # ── the store ──
    Family(
        name="store_latency_seconds",
        kind="histogram",
        labels=("verb",),
        bounds=_QUICK,
        place="both",
        doc="How long calls of the store took, by verb.",
    ),
    Family(
        name="store_errors_total",
        kind="counter",
        labels=("verb",),
        place="both",
        doc="Calls of the store that failed: away, busy, full.",
    ),
    # ── the API ──
    Family(
        name="http_requests_total",
        kind="counter",
        labels=("method", "path_template", "status_code"),
        place="api",
        doc="Requests that were answered.",
    ),
    Family(
        name="http_request_duration_seconds",
        kind="histogram",
        labels=("method", "path_template", "status_code"),
        bounds=_QUICK,
        place="api",
        doc="How long their answers took; a long poll takes as long as it waits.",
    ),
    Family(name="http_requests_in_flight", kind="gauge", place="api", doc="Requests that wait for their answers."),
    # ── the queues, as the store has them: at most some seconds old ──
    Family(name="store_up", kind="gauge", place="api", doc="1 if the store could be asked for the figures below."),
    Family(
        name="queue_jobs",
        kind="gauge",
        labels=("queue", "state"),
        place="api",
        doc="Jobs of a queue that are queued, scheduled, failed (to be retried), running or dead. "
        "Counted up to 100,000 of each.",
    ),
    Family(
        name="queue_oldest_seconds",
        kind="gauge",
        labels=("queue",),
        place="api",
        doc="How long the oldest job that could run has waited; 0 where none does.",
    ),
    Family(
        name="queue_paused", kind="gauge", labels=("queue",), place="api", doc="1 while no worker may take its jobs."
    ),
    Family(name="workers", kind="gauge", place="api", doc="Worker processes that beat within their lease."),
    Family(
        name="throughput_jobs_per_second",
        kind="gauge",
        place="api",
        doc="Attempts all workers ended, over the last five minutes.",
    ),
    Family(
        name="predicted_drain_seconds",
        kind="gauge",
        place="api",
        doc="How long the jobs that could run now would take at that rate: what to scale by. 0 where nothing waits, "
        "3600 at most, and also where something waits and nothing was ended.",
    ),
    # ── about the process ──
    Family(name="build_info", kind="gauge", labels=("version",), place="both", doc="1; the label says the version."),
)

COUNTED = tuple(each for each in FAMILIES if each.kind != "gauge")
"""Those that grow."""

GAUGES = {each.name: each for each in FAMILIES if each.kind == "gauge"}
"""Metrics that are read at each scrape."""
