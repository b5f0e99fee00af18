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
        "jobs_submitted_total", "counter", "Jobs this process submitted that are new.", ("task",), exposed_by="both"
    ),
    Family(
        "jobs_idempotent_total",
        "counter",
        "Submissions answered with an existing job of the same key or id.",
        ("task",),
        exposed_by="both",
    ),
    Family("jobs_succeeded_total", "counter", "Jobs that ended in success, and that is stored.", ("task",)),
    Family("jobs_failed_total", "counter", "Attempts that failed and will be retried.", ("task",)),
    Family("jobs_dead_total", "counter", "Jobs that became dead letters.", ("task",)),
    Family(
        "jobs_deferred_total",
        "counter",
        "Jobs given back for another worker: `no_handler`, `payload` or `encrypted` says why this one could not.",
        ("task", "reason"),
    ),
    Family(
        "jobs_suspended_total",
        "counter",
        "Jobs that began to wait without a runner: `signal` or `children` says for what.",
        ("task", "reason"),
    ),
    Family("steps_recorded_total", "counter", "Steps of workflows that were recorded."),
    Family(
        "jobs_expired_total", "counter", "Jobs that ended because no worker took them by their `expires`.", ("task",)
    ),
    Family("faults_injected_total", "counter", "Faults that were injected on purpose.", ("kind",)),
    Family("jobs_retried_total", "counter", "Jobs taken again after an attempt that failed or was lost."),
    Family("jobs_recovered_total", "counter", "Jobs whose lease had ended unsettled: their worker was gone."),
    Family("jobs_pruned_total", "counter", "Ended jobs deleted because their time was over."),
    Family(
        "job_duration_seconds",
        "histogram",
        "How long handlers ran, by what came of it: succeeded, failed, dead.",
        ("task", "outcome"),
        bounds=_LONG,
    ),
    Family(
        "job_lateness_seconds",
        "histogram",
        "Queue wait time: from the moment a job is ready to its claim. Its count is the jobs claimed of each queue.",
        ("queue",),
        bounds=_LONG,
    ),
    # ── schedules ──
    Family("schedule_runs_total", "counter", "Jobs that ticks of the schedule submitted.", ("schedule",)),
    Family(
        "schedule_missed_total", "counter", "Ticks whose time had passed, and that were not made up for.", ("schedule",)
    ),
    # ── leases ──
    Family("lease_acquired_total", "counter", "Jobs this worker took."),
    Family(
        "lease_rejected_total",
        "counter",
        "Delivered ids that could not be claimed: no such job was ready in the queue.",
    ),
    Family(
        "transport_malformed_total",
        "counter",
        "Messages without a job id that a transport delivered.",
        exposed_by="both",
    ),
    Family("lease_lost_total", "counter", "Runs that lost their lease: another worker may have the job."),
    # ── the worker itself ──
    Family("worker_active_jobs", "gauge", "Handlers that run now."),
    Family("worker_buffered_jobs", "gauge", "Jobs this worker has claimed and not yet begun."),
    Family("worker_slots", "gauge", "Handlers that may run at once: its concurrency."),
    Family("worker_faults", "gauge", "Injected faults that are on in this worker: 0 in any that people rely on."),
    Family("worker_healthy", "gauge", "1 while its heartbeats are stored and it fetches, or nothing waits, else 0."),
    Family("settle_batch_jobs", "histogram", "Jobs that were settled together.", bounds=_SIZES),
    Family(
        "loop_lag_seconds",
        "histogram",
        "How long the event loop took to answer, asked once a second.",
        bounds=_QUICK,
        exposed_by="both",
    ),
    # ── the store ──
    Family(
        "store_latency_seconds",
        "histogram",
        "How long calls of the store took, by verb.",
        ("verb",),
        bounds=_QUICK,
        exposed_by="both",
    ),
    Family(
        "store_errors_total",
        "counter",
        "Calls of the store that failed: away, busy, full.",
        ("verb",),
        exposed_by="both",
    ),
    # ── the API ──
    Family(
        "http_requests_total",
        "counter",
        "Requests that were answered.",
        ("method", "path_template", "status_code"),
        exposed_by="api",
    ),
    Family(
        "http_request_duration_seconds",
        "histogram",
        "How long their answers took; a long poll takes as long as it waits.",
        ("method", "path_template", "status_code"),
        bounds=_QUICK,
        exposed_by="api",
    ),
    Family("http_requests_in_flight", "gauge", "Requests that wait for their answers.", exposed_by="api"),
    # ── the queues, as the store has them: at most some seconds old ──
    Family("store_up", "gauge", "1 if the store could be asked for the figures below.", exposed_by="api"),
    Family(
        "queue_jobs",
        "gauge",
        "Jobs of a queue that are queued, waiting, scheduled, failed (to be retried), running or dead. "
        "Counted up to 100,000 of each.",
        ("queue", "state"),
        exposed_by="api",
    ),
    Family(
        "queue_oldest_seconds",
        "gauge",
        "How long the oldest job that could run has waited; 0 where none does.",
        ("queue",),
        exposed_by="api",
    ),
    Family("queue_paused", "gauge", "1 while no worker may take its jobs.", ("queue",), exposed_by="api"),
    Family(
        "schedule_late_seconds",
        "gauge",
        "How long a tick of the schedule has been due without a worker that fires it; 0 while paused. "
        "Of the first 100 schedules by name.",
        ("schedule",),
        exposed_by="api",
    ),
    Family(
        "schedule_last_run_timestamp_seconds",
        "gauge",
        "Unix time of the latest tick that submitted a job; 0 before the first.",
        ("schedule",),
        exposed_by="api",
    ),
    Family(
        "limit_used",
        "gauge",
        "Weight of the running jobs of a limit with a concurrency; with a key, that of its fullest bucket. "
        "Of the first 100 limits by name; those with a key by the latest 1,000 running jobs.",
        ("limit",),
        exposed_by="api",
    ),
    Family("limit_max", "gauge", "Its concurrency; with a key, that of each bucket.", ("limit",), exposed_by="api"),
    Family(
        "limit_buckets",
        "gauge",
        "Values of its key that have running jobs, of limits with a key.",
        ("limit",),
        exposed_by="api",
    ),
    Family(
        "limit_unstarted_jobs",
        "gauge",
        "Jobs that could run now but for limits and free workers, of limits of a queue.",
        ("limit",),
        exposed_by="api",
    ),
    Family("workers", "gauge", "Worker processes with a heartbeat within their lease.", exposed_by="api"),
    Family(
        "throughput_jobs_per_second",
        "gauge",
        "Attempts all workers ended, over the last five minutes.",
        exposed_by="api",
    ),
    Family(
        "predicted_drain_seconds",
        "gauge",
        "How long the jobs that could run now would take at that rate: what to scale by. 0 where nothing waits, "
        "3600 at most, and also where something waits and nothing was ended.",
        exposed_by="api",
    ),
    # ── about the process ──
    Family("build_info", "gauge", "1; the label says the version.", ("version",), exposed_by="both"),
)

COUNTED = tuple(each for each in FAMILIES if each.kind != "gauge")
"""Those that grow."""

GAUGES = {each.name: each for each in FAMILIES if each.kind == "gauge"}
"""Metrics that are read at each scrape."""
