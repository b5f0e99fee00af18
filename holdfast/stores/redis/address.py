"""Where the jobs are: what a Redis URL says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio.connection import parse_url as parse_driver_url

from holdfast.errors import ConfigError

SCHEMES = frozenset(
    {"redis", "rediss", "valkey", "valkeys", "unix"}
    | {f"{scheme}+{kind}" for scheme in ("redis", "rediss", "valkey", "valkeys") for kind in ("sentinel", "cluster")}
)

LEVELS = ("none", "everysec", "waitaof", "always")
"""How durable an acknowledged write is, the weakest first. ``waitaof`` and ``always`` are equally so."""

_NAMES = {"schedule": "schedule", "ready": "ready", "leases": "leases", "job": "job:"}
"""The keys whose names can be chosen, and their names unless they are."""
_TAKEN = ("meta", "seq", "index:", "chunks", "counts", "queues", "due", "levels:", "quarantine:", "ghosts", "ended:")
_TAKEN_TOO = ("keys", "outlived", "attempts:", "workers", "worker:", "paused", "news", "ended", "nothing")
_OWN = ("namespace", "prefix", "durability", "replicas", "task", "payload", "ids", *_NAMES)
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PORT, _SENTINEL_PORT = 6379, 26379


class Address(NamedTuple):
    """Where the jobs are, how to get there, and what their keys are called."""

    kind: str
    """``direct``, ``sentinel`` or ``cluster``."""
    hosts: tuple[tuple[str, int], ...]
    service: str
    """The name of the primary, for Sentinel."""
    options: dict[str, Any]
    """What the driver's connections are made with, the host apart."""
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
    shown: str
    """The URL without its password."""
    secure: bool
    """Over TLS."""

    @property
    def prefix(self) -> str:
        """What every key begins with."""
        return self.keys[0]


def parse_url(url: str) -> Address:
    """``redis://user:password@host:port/0?namespace=holdfast&durability=everysec``.

    ``rediss``: TLS. ``redis+sentinel://host,host/NAME/0`` and ``redis+cluster://host,host``. Parameters that are not
    ours are the driver's.
    """
    parts = urlsplit(url)
    said = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "\0" in unquote(url):
        raise ConfigError("url: it holds a NUL character; write it without")
    if said.get("password"):
        raise ConfigError("url: give the password before the host (user:password@host), not as a parameter")
    for name in _FILES:
        if name in said and not Path(said[name]).is_file():
            raise ConfigError(f"url: {name}={said[name]!r}: there is no such file")
    own = {name: said.pop(name) for name in _OWN if name in said}
    scheme, _, kind = parts.scheme.replace("valkey", "redis").partition("+")
    secure = "rediss" if scheme in ("rediss", "rediss+") else scheme
    user, at, places = parts.netloc.rpartition("@")
    hosts = _hosts(places, _SENTINEL_PORT if kind == "sentinel" else _PORT)
    path, service = parts.path, ""
    if kind == "sentinel":
        service, _, database = parts.path.removeprefix("/").partition("/")
        path = f"/{database}" if database else ""
        if not service:
            raise ConfigError("url: name the primary that the sentinels know: redis+sentinel://host,host/NAME/0")
    netloc = f"{user}{at}{_netloc(hosts[0])}" if scheme != "unix" else parts.netloc
    try:
        options = dict(parse_driver_url(urlunsplit((secure, netloc, path, urlencode(said), ""))))
    except ValueError as error:
        raise ConfigError(f"url: {error}") from error
    if secure == "rediss":  # older drivers check the certificate and not whose it is
        options.setdefault("ssl_check_hostname", options.get("ssl_cert_reqs") != "none")
    name = quote(unquote(user.partition(":")[0]), safe="") + at
    told = {each: value for each, value in (said | own).items() if "password" not in each}
    shown = urlunsplit((parts.scheme, name + places, parts.path, urlencode(told), ""))
    return Address(
        kind=kind or "direct",
        hosts=hosts,
        service=unquote(service),
        options=options,
        keys=_keys(own, kind),
        durability=_word(own, "durability", LEVELS, "everysec"),
        replicas=_replicas(own),
        task=own.get("task", ""),
        whole=_word(own, "payload", ("pieces", "whole"), "pieces") == "whole",
        ulids=_word(own, "ids", ("uuid", "ulid"), "uuid") == "ulid",
        shown=shown,
        secure=secure == "rediss",
    )


def _hosts(places: str, port: int) -> tuple[tuple[str, int], ...]:
    found = []
    for place in places.split(","):
        one = urlsplit(f"//{place}")
        try:
            found.append((one.hostname or "localhost", one.port or port))
        except ValueError as error:
            raise ConfigError(f"url: {place!r} is no host and port; {error}") from error
    return tuple(found)


def _netloc(host: tuple[str, int]) -> str:
    return f"[{host[0]}]:{host[1]}" if ":" in host[0] else f"{host[0]}:{host[1]}"


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
    taken = {name.strip(":"): name for name in (*_TAKEN, *_TAKEN_TOO)}
    for name, key in names.items():
        bare = key.strip(":")
        others = [other.strip(":") for each, other in names.items() if each != name]
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}:?", key) or bare in taken or bare in others:
            raise ConfigError(
                f"url: {name}={key!r} is not valid; give 1 to 64 of A-Z a-z 0-9 . _ - that no other key is called"
            )
    job = names["job"] if names["job"].endswith(":") else names["job"] + ":"
    return (prefix, *(prefix + names[name].rstrip(":") for name in ("schedule", "ready", "leases")), prefix + job)
