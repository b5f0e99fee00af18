"""Address of the jobs: the parts of a Redis URL."""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.core.errors import ConfigError
from holdfast.stores.connections.redis_url import Server, parse_server

LEVELS = ("none", "everysec", "waitaof", "always")
"""How durable an acknowledged write is, the weakest first. ``waitaof`` and ``always`` are equally so."""

_NAMES = {"schedule": "schedule", "ready": "ready", "leases": "leases", "job": "job:"}
"""The keys whose names can be chosen, and their names unless they are."""
_TAKEN = ("meta", "seq", "index:", "chunks", "counts", "queues", "due", "levels:", "quarantine:", "tombstones")
_TAKEN_TOO = ("ended:", "keys", "outlived", "attempts:", "lines:", "workers", "worker:", "paused")
_CHANNELS = ("news", "orders", "ended", "nothing")
_OWN = ("namespace", "prefix", "durability", "replicas", "task", "payload", "ids", *_NAMES)


class RedisAddress(NamedTuple):
    """Address of the jobs, connection options, and key names."""

    server: Server
    keys: tuple[str, ...]
    """Prefix, schedule, ready, leases, job."""
    durability: str
    replicas: int
    """How many replicas must have a write before it is acknowledged."""
    task: str
    """What a job runs that was written by hand and names no task; "" for nothing."""
    whole: bool
    """Payloads stay in one field of their job's hash, however long."""
    ulids: bool
    """Ids are written as ULIDs, not as UUIDs."""

    @property
    def prefix(self) -> str:
        """Returns the prefix of every key."""
        return self.keys[0]


def parse_url(url: str) -> RedisAddress:
    """``redis://user:password@host:port/0?namespace=holdfast&durability=everysec``.

    ``rediss``: TLS. ``redis+sentinel://host,host/NAME/0`` and ``redis+cluster://host,host``. Parameters that are not
    ours are the driver's.
    """
    server, own = parse_server(url, own=_OWN)
    return RedisAddress(
        server=server,
        keys=_keys(own, server.kind),
        durability=_word(own, "durability", LEVELS, "everysec"),
        replicas=_replicas(own),
        task=own.get("task", ""),
        whole=_word(own, "payload", ("pieces", "whole"), "pieces") == "whole",
        ulids=_word(own, "ids", ("uuid", "ulid"), "uuid") == "ulid",
    )


def _word(own: dict[str, str], name: str, known: tuple[str, ...], default: str) -> str:
    word = own.get(name, default)
    if word not in known:
        raise ConfigError(f"url: {name}={word!r} is not valid; give one of: {', '.join(known)}")
    return word


def _replicas(own: dict[str, str]) -> int:
    text = own.get("replicas", "0")
    if not re.fullmatch(r"[0-9]", text):
        raise ConfigError(f"url: replicas={text!r} is not valid; give 0 to 9")
    return int(text)


def _keys(own: dict[str, str], kind: str) -> tuple[str, ...]:
    namespace = own.get("namespace", "holdfast")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", namespace):
        raise ConfigError(f"url: namespace={namespace!r} is not valid; give 1 to 64 of A-Z a-z 0-9 . _ -")
    prefix = own.get("prefix", "{" + namespace + "}:")
    if not prefix or not prefix.isprintable() or len(prefix) > 100:
        raise ConfigError(f"url: prefix={prefix!r} is not valid; give 1 to 100 printable characters")
    if kind == "cluster" and not re.search(r"\{[^}]+\}", prefix):
        raise ConfigError(f"url: prefix={prefix!r} has no {{tag}}; in a cluster all keys must be in one hash slot")
    names = {name: own.get(name, default) for name, default in _NAMES.items()}
    taken = {name.strip(":"): name for name in (*_TAKEN, *_TAKEN_TOO, *_CHANNELS)}
    for name, key in names.items():
        bare = key.strip(":")
        others = [other.strip(":") for each, other in names.items() if each != name]
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}:?", key) or bare in taken or bare in others:
            raise ConfigError(
                f"url: {name}={key!r} is not valid; give 1 to 64 of A-Z a-z 0-9 . _ - that no other key is called"
            )
    job = names["job"] if names["job"].endswith(":") else names["job"] + ":"
    return (prefix, *(prefix + names[name].rstrip(":") for name in ("schedule", "ready", "leases")), prefix + job)
