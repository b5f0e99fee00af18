"""The databases of a Django project: their URLs, and connections around handlers."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, reset_queries
from django.db.backends.base.base import BaseDatabaseWrapper

from holdfast.tasks import Context

_LIBPQ = ("passfile", "service", "sslcert", "sslkey", "sslmode", "sslrootcert", "target_session_attrs")
"""Options of DATABASES that the URL passes on: those that find and secure the server."""


def database_url(alias: str) -> str:
    """Returns the URL of a database of ``DATABASES`` as it is now: test runners rename it.

    A SQLite database in memory cannot hold jobs; its URL names a file of this process, removed at its end.
    """
    connection = connections[alias]
    if connection.vendor == "postgresql":
        return _postgres_url(connection.settings_dict)
    if connection.vendor != "sqlite":
        raise ImproperlyConfigured(
            f"DATABASES[{alias!r}] ({connection.vendor}) cannot hold jobs; name a store of its own, such as "
            'HOLDFAST = {"URL": "redis://localhost:6379/0"}'
        )
    path = connection.settings_dict["NAME"]
    file = _private_file() if connection.is_in_memory_db() else Path(path).absolute()
    return f"sqlite:///{quote(str(file))}"


def find_place(url: str) -> tuple[object, ...]:
    """Returns what all URLs of one database have in common: its file, or its servers and its name."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return ("sqlite", Path(unquote(parts.path.removeprefix("/"))).resolve())
    options = dict(parse_qsl(parts.query))
    given = unquote(parts.netloc.rpartition("@")[2]) or options.get("host") or os.environ.get("PGHOST", "")
    hosts = [host.rpartition(":") if host.rpartition(":")[2].isdigit() else (host, "", "") for host in given.split(",")]
    ports = (options.get("port") or os.environ.get("PGPORT") or "5432").split(",") * len(hosts)
    places = [(host.lower(), own or port) for (host, _, own), port in zip(hosts, ports, strict=False)]
    name = unquote(parts.path.removeprefix("/")) or options.get("dbname") or os.environ.get("PGDATABASE")
    return ("postgresql" if parts.scheme == "postgres" else parts.scheme, places, name, options.get("service"))


def is_url_of(url: str, alias: str) -> bool:
    """Returns True if the URL names the database of the alias; none names one in memory."""
    connection = connections[alias]
    is_in_memory = connection.vendor == "sqlite" and connection.is_in_memory_db()
    if is_in_memory or connection.vendor not in ("postgresql", "sqlite"):
        return False
    return find_place(url) == find_place(database_url(alias))


def check_test_access(connection: Any) -> None:
    """Raises the error of a test that may not use the database: a SimpleTestCase, or one of pytest-django.

    Holdfast has its own connections, and would store the job in the database of the project itself.
    """
    if BaseDatabaseWrapper.ensure_connection.__module__ != BaseDatabaseWrapper.__module__:  # test runners replace it
        connection.ensure_connection()
    if hasattr(connection.cursor, "wrapped"):  # SimpleTestCase replaces it, too, for connections that are open
        connection.cursor()


def _postgres_url(given: dict[str, Any]) -> str:
    options = {name: str(given["OPTIONS"][name]) for name in _LIBPQ if name in given["OPTIONS"]}
    hosts, ports = str(given["HOST"]).split(","), str(given["PORT"]).split(",")
    if not given["HOST"] or given["HOST"].startswith("/"):  # the directory of a socket
        parts = {"host": given["HOST"], "port": ports[0]}
        options |= {name: value for name, value in parts.items() if value}
        hosts = [""]
    hosts = [f"[{host}]" if ":" in host else host for host in hosts]
    ports = ports * len(hosts) if len(ports) == 1 else ports
    place = ",".join(f"{host}:{port}" if port and host else host for host, port in zip(hosts, ports, strict=True))
    secret = f":{quote(given['PASSWORD'], safe='')}" if given["PASSWORD"] else ""
    login = quote(given["USER"], safe="") + secret
    name = quote(given["NAME"] or ("" if "service" in options else "postgres"), safe="")
    return f"postgresql://{login}{'@' if login else ''}{place}/{name}{'?' if options else ''}{urlencode(options)}"


def _private_file() -> Path:
    return Path(_private_folder().name) / f"jobs-{os.getpid()}.db"


@cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Made before test runners fork, and removed by the process that made it."""
    return tempfile.TemporaryDirectory(prefix="holdfast-django-")


class RenewedConnections:
    """Handler scope: closes connections that are broken or too old, before and after, as Django does around requests.

    For ``async def`` handlers in the thread where asgiref runs the ORM.
    """

    def __init__(self, _: Context) -> None: ...

    def __enter__(self) -> None:
        _renew_connections()

    def __exit__(self, *failure: object) -> None:
        _renew_connections()

    async def __aenter__(self) -> None:
        await sync_to_async(_renew_connections)()

    async def __aexit__(self, *failure: object) -> None:
        await sync_to_async(_renew_connections)()


def _renew_connections() -> None:
    reset_queries()  # with DEBUG they would pile up
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:  # of a test, which runs the job inside its transaction
            connection.close_if_unusable_or_obsolete()
