"""Where a store may be. A test that holds for every store runs once for each of STORES; a new one gets a line there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from holdfast.settings.settings import PREFIX
from holdfast.stores import open_store
from holdfast.stores.common.named_sql import load_migrations
from tests.support import postgres, redis
from tests.support.schemas import migrated_schema

Home = Callable[[Path], AbstractContextManager[str]]
"""From a folder of the test's own to the URL of an empty store that is the test's own too, and goes with it."""


@contextmanager
def sqlite_file(folder: Path) -> Iterator[str]:
    """``holdfast.db`` in the folder, not there yet."""
    yield f"sqlite:///{folder}/holdfast.db"


@contextmanager
def migrated_file(folder: Path) -> Iterator[str]:
    """``holdfast.db`` in the folder, with every migration."""
    path = folder / "holdfast.db"
    path.touch(mode=0o600)
    path.write_bytes(_migrated_content())
    yield f"sqlite:///{path}"


@cache
def _migrated_content() -> bytes:
    with TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/holdfast.db")
        store.blocking(store.open())
        store.blocking(store.close())
        return Path(folder, "holdfast.db").read_bytes()


def postgres_schema(major: int, *, migrated: bool = False) -> Home:
    """A schema on the server that the tests of this process share: not there yet, or with every migration."""

    @contextmanager
    def home(folder: Path) -> Iterator[str]:
        server = postgres.shared(major)
        with migrated_schema(major) if migrated else server.fresh_schema() as schema:
            yield server.url(schema=schema)

    return home


def redis_namespace(kind: str) -> Home:
    """A namespace, empty, on the server that the tests of this process share."""

    @contextmanager
    def home(folder: Path) -> Iterator[str]:
        server = redis.shared(kind)
        with server.fresh_namespace() as namespace:
            yield server.url(namespace=namespace)

    return home


def carried(kind: str, *, migrated: bool = False) -> Home:
    """A schema whose ready jobs a transport carries, by keys of its own, on the servers that the tests of this process
    share. Everything in this process, and what it starts, learns it from the environment."""
    schema = postgres_schema(postgres.MAIN, migrated=migrated)

    @contextmanager
    def home(folder: Path) -> Iterator[str]:
        server = redis.shared()
        with schema(folder) as url, server.fresh_namespace() as namespace:
            given = {
                "TRANSPORT": kind,
                "TRANSPORT_URL": server.url(),
                "TRANSPORT_KEY": f"{{{namespace}}}:ready",
                "TRANSPORT_DEAD_KEY": f"{{{namespace}}}:dead",
            }
            with pytest.MonkeyPatch.context() as patch:
                for name, value in given.items():
                    patch.setenv(PREFIX + name, value)
                yield url

    return home


def _stores(*, migrated: bool) -> dict[str, Home]:
    return {
        "sqlite": migrated_file if migrated else sqlite_file,
        "postgres": postgres_schema(postgres.MAIN, migrated=migrated),
        "postgres16": postgres_schema(postgres.FLOOR, migrated=migrated),
        "redis": redis_namespace(redis.MAIN),
        "postgres_list": carried("redis_list", migrated=migrated),
        "postgres_stream": carried("redis_stream", migrated=migrated),
        **{f"redis{number}": redis_namespace(kind) for number, kind in zip((6,), redis.FLOORS, strict=False)},
    }


STORES = _stores(migrated=False)
"""Every store there is, by the name that tests of it alone have in the names of their files."""

MIGRATED = _stores(migrated=True)
"""The same for tests that are not about what opening makes: no schema is made for each, which takes the longest."""


def migrations(kind: str) -> list[str]:
    """The names of all migrations of a SQL store, in their order."""
    return [each.name for each in load_migrations(files(f"holdfast.stores.{kind}") / "migrations")]


OLDER = frozenset({"postgres16", "redis6"})
"""Of them, the older versions: conformance alone is tested on each of these."""


CARRIED = frozenset({"postgres_list", "postgres_stream"})
"""Of them, those whose ready jobs a transport carries: jobs come in the order of their arrival there (promise 6)."""


VERSIONS = (frozenset({"postgres", "postgres16"}), frozenset({"redis", "redis6"}))
"""Of them, those that are versions of one server."""

SERVED = frozenset(STORES) - OLDER - {"sqlite"}
"""Of them, those on a server, each in its main version."""


def one_of(group: frozenset[str], names: list[str], test: str) -> list[str]:
    """Returns these stores, but of the group one, by the test's name: what is the same on all of it runs on one."""
    found = [name for name in names if name in group]
    chosen = found and found[-1 - zlib.crc32(test.encode()) % len(found)]
    return [name for name in names if name not in group or name == chosen]


def stores_of(file: str, *, older: bool = True) -> list[str]:
    """The stores that the tests in a file of this name run on: those it names (``test_plans_sqlite``), or all."""
    named = [name for name in STORES if name.rstrip("0123456789") in file.split("_")]
    return [name for name in named or STORES if older or name not in OLDER]
