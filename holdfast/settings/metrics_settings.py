"""The settings of metrics and health."""

from __future__ import annotations

from holdfast.settings.types import HOST, METRIC_PREFIX, TASK_FIELD, Setting, duration, optional, whole_number


class MetricsSettings:
    """Settings of metrics and health endpoints."""

    __slots__ = ()

    metrics_prefix = Setting(METRIC_PREFIX, "holdfast_", "What the name of every metric begins with.")
    task_field = Setting(TASK_FIELD, "task", "What log lines and metrics call the name of a job's task.")
    metrics_labels = Setting(
        whole_number(1, 10_000), 100, "Tasks, and queues, that metrics tell apart; later ones are counted as other."
    )
    metrics_port = Setting(
        optional("none", whole_number(0, 65_535)),
        "none",
        "The port on which a worker tells its metrics and health; 0: a free one. Of several processes each takes the "
        "next one.",
    )
    metrics_host = Setting(
        HOST,
        "127.0.0.1",
        "The address of that port, which asks for no key: one that others can reach needs `metrics_open`.",
    )
    health_within = Setting(
        duration("3s", "1d"),
        "60s",
        "A worker is healthy if it fetched jobs, or knew that there are none, within this time beyond its poll.",
    )
