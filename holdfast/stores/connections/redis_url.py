"""Server part of a Redis URL."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio import connection as driver
from redis.exceptions import RedisError

from holdfast.core.errors import ConfigError
from holdfast.core.validation import did_you_mean
from holdfast.stores.common.server_store import split_server_url

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PARAMETERS = (
    *("client_name", "db", "health_check_interval", "protocol", "retry_on_timeout", "username"),
    *("socket_connect_timeout", "socket_keepalive", "socket_timeout"),
    *(name for name in inspect.signature(driver.SSLConnection).parameters if name.startswith("ssl_")),
)
"""Parameters of the driver's connections; others are objects, or change what it answers."""
_PORT, _SENTINEL_PORT = 6379, 26379


class Server(NamedTuple):
    """Address of a server and how to connect to it."""

    kind: str
    """``direct``, ``sentinel`` or ``cluster``."""
    hosts: tuple[tuple[str, int], ...]
    service: str
    """The name of the primary, for Sentinel."""
    options: dict[str, Any]
    """What the driver's connections are made with, the host apart."""
    shown: str
    """The URL without its password."""
    secure: bool
    """Over TLS."""


def parse_server(url: str, *, own: Collection[str] = (), field: str = "url") -> tuple[Server, dict[str, str]]:
    """The server, and the parameters of the URL that are called as ``own`` says; the others are the driver's.

    ConfigError, naming the ``field``, for a URL that cannot be read."""
    parts = split_server_url(url, "redis://user:password@host:port/0", field)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if given.get("password"):
        raise ConfigError(f"{field}: give the password before the host (user:password@host), not as a parameter")
    for name in _FILES:
        if name in given and not Path(given[name]).is_file():
            raise ConfigError(f"{field}: {name}={given[name]!r}: there is no such file")
    own_parameters = {name: given.pop(name) for name in own if name in given}
    scheme, _, kind = parts.scheme.replace("valkey", "redis").partition("+")
    for name in given:
        if name not in _PARAMETERS:
            raise ConfigError(
                f"{field}: {name} is no parameter of a connection{did_you_mean(name, [*own, *_PARAMETERS])}"
            )
        if name.startswith("ssl_") and scheme != "rediss":
            raise ConfigError(f"{field}: {name} needs TLS; write the URL as rediss://")
        if name == "socket_keepalive" and scheme == "unix":
            raise ConfigError(f"{field}: {name} is for TCP; remove it")
    user, at, places = parts.netloc.rpartition("@")
    hosts = _hosts(field, places, _SENTINEL_PORT if kind == "sentinel" else _PORT)
    path, service = parts.path, ""
    if kind == "sentinel":
        service, _, database = parts.path.removeprefix("/").partition("/")
        path = f"/{database}" if database else ""
        if not service:
            raise ConfigError(f"{field}: name the primary that the sentinels know: redis+sentinel://host,host/NAME/0")
    if scheme != "unix" and not re.fullmatch(r"/?\d*/?", path):
        raise ConfigError(f"{field}: {path!r} is no number of a database; write it as in redis://localhost:6379/0")
    try:
        options: dict[str, Any] = {**driver.parse_url(urlunsplit((scheme, user + at, path, urlencode(given), "")))}
        connection = options.pop("connection_class", driver.Connection)
        connection(**options)  # not connected: only the driver knows which values it takes
        options["connection_class"] = connection
    except (ValueError, TypeError, RedisError) as error:
        raise ConfigError(f"{field}: {error}") from error
    if scheme == "rediss":  # older drivers check the certificate and not whose it is
        options.setdefault("ssl_check_hostname", options.get("ssl_cert_reqs") != "none")
    name = f"{quote(unquote(user.partition(':')[0]), safe='')}@".removeprefix("@")  # no user, but a password: no @
    public = {each: value for each, value in (given | own_parameters).items() if "password" not in each}
    shown = urlunsplit((parts.scheme, name + places, parts.path, urlencode(public), ""))
    server = Server(kind or "direct", hosts, unquote(service), options, shown, scheme == "rediss")
    return server, own_parameters


def _hosts(field: str, places: str, port: int) -> tuple[tuple[str, int], ...]:
    try:
        found = [urlsplit(f"//{place}") for place in places.split(",")]
        return tuple((each.hostname or "localhost", each.port or port) for each in found)
    except ValueError as error:
        raise ConfigError(f"{field}: {places!r} is no host and port; {error}") from error
