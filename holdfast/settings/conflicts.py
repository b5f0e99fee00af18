"""Settings that are each valid and cannot stand together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from holdfast.core.validation import format_duration


def find_conflicts(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Values that are each valid and cannot stand together: their names, and the remedy."""
    lease, beat = values["lease"], values["beat"]
    if beat * 3 > lease:
        most = format_duration(timedelta(milliseconds=math.floor(lease / timedelta(milliseconds=3))))
        problem = (
            f"beat: {format_duration(beat)} is more than a third of the lease of {format_duration(lease)}; "
            f"set beat to at most {most}, or lease to at least {format_duration(beat * 3)}"
        )
        yield ("beat", "lease"), problem
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
    yield from _transport(values)


def _transport(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    kind, url, store = values["transport"], values["transport_url"], values["url"]
    if kind == "none":
        return
    if not store.startswith(("postgresql:", "postgres:")):
        problem = (
            f"transport: {kind} carries the ids of jobs that PostgreSQL holds; url names another store, which wakes "
        )
        yield ("transport", "url"), f"{problem}its workers itself; set transport to none, or url to postgresql://…"
    if url is None:
        yield ("transport", "transport_url"), f"transport: {kind} needs transport_url, such as redis://localhost:6379/0"
    elif not re.match(r"(redis|rediss|valkey|valkeys|unix)(\+(sentinel|cluster))?:", url):
        yield ("transport_url",), "transport_url: name a Redis or Valkey, such as redis://localhost:6379/0"
    if values["transport_key"] == values["transport_dead_key"]:
        yield ("transport_key", "transport_dead_key"), "transport_dead_key: it is transport_key too; name another key"
