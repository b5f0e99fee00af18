"""The stores. ``open_store`` picks one by URL; no code above this package knows which.

base.py         the contract: families of verbs
forwarding.py   bases of wrappers, a class a family
common/         parts that several stores share
connections/    connections to servers
external_tx.py  jobs inside a transaction of the caller
sqlite/ postgres/ redis/   a store each: one module a family
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from holdfast.core.errors import ConfigError
from holdfast.core.validation import did_you_mean
from holdfast.stores.base import Store
from holdfast.stores.external_tx import ExternalTransactions
from holdfast.stores.sqlite.store import SQLiteStore

__all__ = ["ExternalTransactions", "check_url", "open_store"]

_REDIS = ("redis", "rediss", "valkey", "valkeys", "unix")
_POSTGRES = ("postgresql", "postgres")


def open_store(url: str, *, now: Callable[[], int] | None = None, call_deadline: float | None = None) -> Store:
    """The store behind ``url``, not yet opened. ``now`` replaces the store's clock; only tests give one.

    ``call_deadline``: seconds a call from an event loop may take if a caller waits for its answer: on a file, the wait
    for its lock.

    ``sqlite:///relative.db`` and ``sqlite:////absolute.db`` name a file, ``postgresql://user@host/db`` a database,
    ``redis://host:6379/0`` a Redis or Valkey.
    """
    scheme = check_url(url)
    if scheme == "sqlite":
        return SQLiteStore(_sqlite_path(url), now=now, call_deadline=call_deadline)
    return (_postgres if scheme in _POSTGRES else _redis)(url, now, call_deadline)


def check_url(url: str) -> str:
    """Returns the scheme of a URL that can name a store. Raises `ConfigError`; opens nothing."""
    scheme, colon, _ = url.partition(":")
    scheme = scheme.lower() if colon else ""
    database, plus, driver = scheme.partition("+")
    if scheme == "sqlite":
        _sqlite_path(url)
    elif scheme not in _POSTGRES and database not in _REDIS:
        if plus and database in ("sqlite", *_POSTGRES):
            raise ConfigError(f"url: Holdfast brings its own driver; leave out +{driver}: {database}://…")
        known = "sqlite:///file.db, postgresql://user@host/database or redis://host:6379/0"
        hint = did_you_mean(scheme, ("sqlite", *_POSTGRES, *_REDIS))
        raise ConfigError(f"url: the scheme {scheme!r} is not known; give {known}{hint}")
    return scheme


def _postgres(url: str, now: Callable[[], int] | None, call_deadline: float | None) -> Store:
    try:
        from holdfast.stores.postgres.store import PostgresStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"url: PostgreSQL needs {error.name}; pip install 'holdfast[postgres]'") from None
    return PostgresStore(url, now=now, call_deadline=call_deadline)


def _redis(url: str, now: Callable[[], int] | None, call_deadline: float | None) -> Store:
    try:
        from holdfast.stores.redis.id_codec import redis_store
    except ModuleNotFoundError as error:
        raise ConfigError(f"url: Redis needs {error.name}; pip install 'holdfast[redis]'") from None
    return redis_store(url, now, call_deadline)


def _sqlite_path(url: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc:
        raise ConfigError(
            f"url: {parts.netloc} stands where others name a host; a file takes three slashes: "
            f"sqlite:///{parts.netloc}{path}"
        )
    if parts.query or parts.fragment:
        raise ConfigError("url: a sqlite URL takes no parameters; percent-encode ? and # in the file's name")
    path = path.removeprefix("/")
    if path in ("", ":memory:"):
        raise ConfigError("url: a queue in memory would lose its jobs; name a file, as in sqlite:///holdfast.db")
    if "\0" in path:
        raise ConfigError("url: the file's name holds a NUL character; name another file")
    return path
