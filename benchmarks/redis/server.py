"""The servers all rows share, and new namespaces on them."""

from __future__ import annotations

import atexit
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from itertools import takewhile

from redis import Redis as Client

from tests.support.redis import MAIN, Redis, installed

EVERYSEC, ALWAYS = "everysec", "always"
_MIMALLOC = "cmeel.prefix/lib/libmimalloc.so"


def allocator() -> str:
    """Servers are mostly built with jemalloc, which takes a third off what a script costs; this wheel's is not. It is
    given that of the system, or else mimalloc, which the extra ``bench`` installs; or else the C library's."""
    try:
        return find_library("jemalloc") or str(distribution("cmeel-mimalloc").locate_file(_MIMALLOC))
    except PackageNotFoundError:
        return "glibc"


@cache
def _server(fsync: str) -> Redis:
    """Valkey, with an append-only log. It ends with this process."""
    library = allocator()
    server = Redis(settings={"appendfsync": fsync}, environment={} if library == "glibc" else {"LD_PRELOAD": library})
    server.start()
    atexit.register(server.close)
    return server


@contextmanager
def namespace(fsync: str = EVERYSEC) -> Iterator[str]:
    """The URL of an empty one, emptied again in the end."""
    server = _server(fsync)
    with server.fresh_namespace() as name:
        yield server.url(namespace=name, durability=fsync)


@contextmanager
def database(fsync: str = EVERYSEC) -> Iterator[str]:
    """The plain URL of an empty server, for those whose keys have fixed names; emptied again in the end."""
    server = _server(fsync)
    server.execute("FLUSHALL")
    yield server.url()
    server.execute("FLUSHALL")


def client(fsync: str = EVERYSEC) -> Client:
    """A plain connection."""
    return _server(fsync).client()


def rewrite_log(fsync: str = EVERYSEC) -> None:
    """Begin every measurement with the same: a log of what there is, and nothing else."""
    with client(fsync) as connection:
        connection.bgrewriteaof()
        while True:
            info = connection.info("persistence")
            if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
                return
            time.sleep(0.01)


def cpu_seconds(fsync: str = EVERYSEC) -> float:
    """CPU time of the thread that does the work, so far."""
    with client(fsync) as connection:
        info = connection.info("cpu")
        return float(info["used_cpu_sys_main_thread"] + info["used_cpu_user_main_thread"])


@contextmanager
def commands(fsync: str = EVERYSEC) -> Iterator[Callable[[], int]]:
    """Answers, when called, how many commands clients have sent since; what scripts call was not sent by anybody."""
    sent = 0
    with client(fsync) as listener, listener.monitor() as monitor, client(fsync) as marker:

        def so_far() -> int:
            nonlocal sent
            marker.echo("here")
            heard = takewhile(lambda each: each["command"] != "ECHO here", monitor.listen())
            sent += sum(each["client_type"] != "lua" for each in heard)
            return sent

        yield so_far


def used_bytes() -> int:
    """What the server's data takes."""
    with client() as connection:
        return int(connection.info("memory")["used_memory"])


def version() -> str:
    """That of the server, started or not."""
    given = subprocess.check_output([installed(MAIN), "--version"], text=True)
    return next(word.removeprefix("v=") for word in given.split() if word.startswith("v="))
