"""Settings of the HTTP API, metrics, health, alerts and job resources; conflicts between settings."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping
from datetime import timedelta
from typing import Any

from holdfast.core.validation import format_duration
from holdfast.settings.types import (
    ALERTS,
    FILE,
    FLAG,
    HOST,
    HOSTS,
    LIMITS,
    METRIC_PREFIX,
    NETWORKS,
    ORIGINS,
    PROGRAM,
    SERVICE,
    TASK_FIELD,
    WEBHOOK,
    Setting,
    byte_size,
    duration,
    one_of,
    optional,
    whole_number,
)


class ResourceSettings:
    """Settings of limits, of the resources of a job, and of the sandbox of command jobs."""

    __slots__ = ()

    limits = Setting(
        LIMITS,
        {},
        "[Limits](limits.md#in-settings) that a worker writes to the store, each with the options of `app.limit`.",
    )
    job_memory = Setting(
        optional("none", byte_size("16MiB", "1024GiB")),
        "none",
        "The most memory that a job of a process task or a command may use, with all its processes; the limit of those "
        "that do not say.",
    )
    job_cpu = Setting(
        optional("none", duration("100ms", "30d")), "none", "The most CPU time, of all its processes, in the same way."
    )
    job_open_files = Setting(
        optional("none", whole_number(16, 1_000_000)),
        "none",
        "The most files that each of its processes may have open.",
    )
    job_file_size = Setting(optional("none", byte_size("0B", "1024GiB")), "none", "The largest file that it may write.")
    job_processes = Setting(
        optional("none", whole_number(1, 1_000_000)), "none", "The most processes that it may have at once."
    )
    sandbox = Setting(
        one_of("none", "strict"),
        "none",
        "The sandbox of command jobs. With none a job may ask for strict; with strict no job may ask for less.",
    )
    sandbox_network = Setting(FLAG, False, "Whether a sandboxed command that asks for the network gets it.")


class HttpSettings:
    """Settings of the HTTP API."""

    __slots__ = ()

    key_required = Setting(FLAG, False, "Whether a submission over HTTP must carry an idempotency key.")
    api_host = Setting(HOST, "127.0.0.1", "The address `holdfast api` listens on.")
    api_port = Setting(whole_number(0, 65_535), 8000, "The port `holdfast api` listens on; 0: a free one.")
    tls_certificate = Setting(optional("none", FILE), "none", "The certificate with which `holdfast api` speaks TLS.")
    tls_key = Setting(optional("none", FILE), "none", "The private key of that certificate.")
    api_service = Setting(SERVICE, "holdfast-api", "What the API calls itself in `/health`.")
    claim_wait = Setting(
        duration("0s", "60s"),
        "60s",
        "How long a claim over HTTP may wait for jobs at most; some proxies allow no more than 30s.",
    )
    keys_file = Setting(
        optional("none", FILE),
        "none",
        "The file of API keys, made by `holdfast keys create`; with one, every caller of the API needs a key.",
    )
    metrics_open = Setting(
        FLAG,
        False,
        "Whether metrics are shown without a key: by an API that asks for keys, and by a worker whose `metrics_host` "
        "others can reach.",
    )
    key_rate = Setting(optional("unlimited", whole_number(1, 1_000_000)), "unlimited", "Requests a second of one key.")
    address_rate = Setting(
        optional("unlimited", whole_number(1, 1_000_000)), "unlimited", "Requests a second of one address."
    )
    rate_burst = Setting(whole_number(1, 1_000_000), 50, "Requests that may come at once, where a rate limits them.")
    refused_keys = Setting(
        whole_number(1, 1_000_000),
        30,
        "Refused keys a minute after which an address must wait; good keys do not count.",
    )
    trusted_proxies = Setting(
        NETWORKS, "", "Proxies whose X-Forwarded-For is believed; from others it is no more than text."
    )
    allowed_hosts = Setting(
        HOSTS,
        "",
        "Names with a dot by which `holdfast api` may be called; without keys no other is answered, for a page of "
        "another site could have made it up.",
    )
    allowed_origins = Setting(ORIGINS, "", "Sites whose pages may call the API from a browser (CORS).")
    audit_file = Setting(
        optional("none", FILE), "none", "The file to which every call that changes something is added, hash-chained."
    )
    connections = Setting(whole_number(1, 100_000), 2000, "Connections `holdfast api` holds at once.")
    connections_per_address = Setting(whole_number(1, 100_000), 1000, "Connections of one address at once.")
    header_timeout = Setting(duration("10ms", "5m"), "10s", "How long the head of a request may take to arrive.")
    body_timeout = Setting(
        duration("10ms", "1h"), "30s", "How long a body may take to arrive, and an answer to be taken away."
    )
    long_polls_per_key = Setting(
        whole_number(1, 100_000),
        500,
        "Requests of one key, or of one address without keys, that wait at once: for jobs, or for the end of one.",
    )
    event_streams = Setting(whole_number(1, 100_000), 200, "Streams of events at once, in all.")
    event_streams_per_key = Setting(whole_number(1, 100_000), 20, "Streams of one key, or of one address without keys.")
    event_stream_for = Setting(
        duration("0s", "1d"), "1h", "How long a stream of events lasts before its client is to connect again."
    )
    keep_alive = Setting(duration("1s", "1h"), "15s", "How long a connection without a request stays open.")


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
        "A worker is well if it fetched jobs, or found none, within this time beyond `poll`, and sent a heartbeat too.",
    )


class AlertSettings:
    """Settings of alerts."""

    __slots__ = ()

    alerts = Setting(
        ALERTS, {}, "[Rules](alerts.md) whose breach is an alert: each with one condition, for one queue or for each."
    )
    alert_webhook = Setting(
        optional("none", WEBHOOK), "none", "The URL to which alerts are sent, as a POST of JSON. Shown without secrets."
    )
    alert_command = Setting(
        optional("none", PROGRAM),
        "none",
        "The program that gets alerts instead, each as JSON on its input. It runs without a shell.",
    )
    alert_hold_off = Setting(
        duration("0s", "30d"),
        "15m",
        "How long a rule stays silent about a queue after an alert has cleared, if it is breached again.",
    )
    alert_every = Setting(duration("1s", "1h"), "60s", "How often each worker, and the API, looks at the rules.")


class ServiceSettings(ResourceSettings, AlertSettings, HttpSettings, MetricsSettings):
    """The settings of this module."""

    __slots__ = ()


def find_conflicts(values: Mapping[str, Any], given: Container[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields conflicts of values: their names, and a message with the remedy. ``given``: those that are no defaults."""
    lease, heartbeat = values["lease"], values["heartbeat"]
    if heartbeat * 3 > lease:
        most = format_duration(timedelta(milliseconds=math.floor(lease / timedelta(milliseconds=3))))
        problem = (
            f"heartbeat: {format_duration(heartbeat)} is more than a third of the lease of {format_duration(lease)}; "
            f"set heartbeat to at most {most}, or lease to at least {format_duration(heartbeat * 3)}"
        )
        yield ("heartbeat", "lease"), problem
    attempts, limit = values["max_attempts"], values["max_attempts_limit"]
    if attempts is not None and limit is not None and attempts > limit:
        yield (
            ("max_attempts", "max_attempts_limit"),
            f"max_attempts: {attempts} is over max_attempts_limit, {limit}; lower the one or raise the other",
        )
    if values["processes"] > 1 and ":memory:" in values["url"]:
        problem = "several processes cannot share a store in memory; set processes to 1, or url to a file"
        yield ("processes", "url"), f"processes: {values['processes']}: {problem}"
    if values["processes"] > 1 and values["worker_id"] is not None:
        problem = f"worker_id: {values['worker_id']} names one worker, but processes is {values['processes']}"
        yield ("processes", "worker_id"), f"{problem}; set processes to 1, or worker_id to minted"
    port = values["metrics_port"]
    if port and port + values["processes"] > 65_536:
        problem = f"metrics_port: {values['processes']} processes take the ports from {port} on, past the last one"
        yield ("metrics_port", "processes"), f"{problem}; set metrics_port lower"
    if values["alert_webhook"] is not None and values["alert_command"] is not None:
        yield ("alert_webhook", "alert_command"), "alert_command: alerts go to alert_webhook already; keep one of them"
    yield from _transport(values, given)


def _transport(values: Mapping[str, Any], given: Container[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    kind, url, store = values["transport"], values["transport_url"], values["url"]
    if kind == "none":
        return
    if "url" in given and not store.startswith(("postgresql:", "postgres:")):  # a default may be replaced in code
        problem = f"transport: {kind} carries the ids of jobs that PostgreSQL holds; url names another store"
        yield ("transport", "url"), f"{problem}; set transport to none, or url to postgresql://…"
    if url is None:
        problem = f"transport: {kind} needs transport_url; set that first, such as redis://localhost:6379/0"
        yield ("transport", "transport_url"), problem
    elif not re.match(r"(redis|rediss|valkey|valkeys|unix)(\+(sentinel|cluster))?:", url):
        yield ("transport_url",), "transport_url: name a Redis or Valkey, such as redis://localhost:6379/0"
    if values["transport_key"] == values["transport_dead_key"]:
        yield ("transport_key", "transport_dead_key"), "transport_dead_key: it is transport_key too; name another key"
