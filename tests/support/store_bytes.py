"""Everything that a store has written, as the bytes in its files or in a dump of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from psycopg import sql

from tests.support.keys import Keys
from tests.support.spoiling import session


def read_store(url: str) -> bytes:
    """Returns the files of a SQLite store with its WAL, the rows of all tables of a schema, or the values of all keys
    of a namespace."""
    if url.startswith("sqlite:"):
        path = Path(url.removeprefix("sqlite:///"))
        return b"\n".join(each.read_bytes() for each in sorted(path.parent.glob(f"{path.name}*")) if each.is_file())
    return b"\n".join(_dump_redis(url) if url.startswith("redis:") else _dump_postgres(url))


def _dump_postgres(url: str) -> Iterator[bytes]:
    find_tables = "select table_name from information_schema.tables where table_schema = current_schema"
    with session(url) as connection:
        for (name,) in connection.execute(find_tables).fetchall():
            for (row,) in connection.execute(sql.SQL("select t::text from {} t").format(sql.Identifier(name))):
                yield row.encode()


def _dump_redis(url: str) -> Iterator[bytes]:
    keys = Keys(url, decode=False)
    readers = {
        b"string": keys.get,
        b"hash": keys.hgetall,
        b"list": lambda name: keys.lrange(name, 0, -1),
        b"set": keys.smembers,
        b"zset": lambda name: keys.zrange(name, 0, -1),
        b"stream": keys.xrange,
    }
    for name in sorted(Keys(url).all()):
        yield repr((name, readers[keys.type(name)](name))).encode()
    keys.client.close()
