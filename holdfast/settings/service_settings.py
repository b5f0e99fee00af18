"""The settings of the HTTP API, of metrics and of health."""

from __future__ import annotations

from holdfast.settings.types import (
    FILE,
    FLAG,
    HOST,
    HOSTS,
    METRIC_PREFIX,
    NETWORKS,
    ORIGINS,
    SERVICE,
    TASK_FIELD,
    Setting,
    duration,
    optional,
    whole_number,
)


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
    waiting_per_key = Setting(
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
        "A worker is healthy if it fetched jobs, or knew that there are none, within this time beyond its poll.",
    )
