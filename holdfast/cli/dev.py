"""``dev``: API and worker for development, in one process. Restarts when code changes, runs commands, and logs for
people."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import click

from holdfast import Holdfast
from holdfast.cli.base import add_command
from holdfast.cli.context import Session
from holdfast.cli.output import print_note
from holdfast.core.errors import ConfigError
from holdfast.views.formatting import safe_text

_LOOK = 0.5  # seconds between looks at the files
_NOT_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"})

Versions = dict[str, int]


@add_command("dev", examples=["holdfast dev --app shop.jobs:app", "holdfast dev --queues mail --port 8080 --no-reload"])
@click.option("--queues", "-Q", metavar="LIST", help="Which queues to serve [*].")
@click.option("--concurrency", "-c", metavar="N", help="Jobs to run at once [10].")
@click.option("--port", "api_port", metavar="N", help="The API's port on this host; 0 takes a free one [8000].")
@click.option("--api/--no-api", default=True, show_default=True, help="Serve the HTTP API beside the worker.")
@click.option("--reload/--no-reload", default=True, show_default=True, help="Start anew when a .py file changes.")
@click.pass_obj
def develop(session: Session, /, *, api: bool, reload: bool, **said: str | None) -> int:
    """Run API and worker in one process for development.

    Command jobs are enabled and logs are readable. When a .py file under the working directory changes it starts anew,
    with the new code. Broken code is reported, and the next change tries again. Ctrl-C ends both.
    """
    from holdfast.cli.loading import startup_explained
    from holdfast.telemetry.logs import configure_logs
    from holdfast.worker import run_worker

    watcher = Watcher(Path.cwd()) if reload else None
    with _mended(watcher):
        app = _load(session, said)
    if api:
        _serve_beside(app)
    finish_logs = configure_logs(app.settings, app.events)
    if watcher is not None:
        watcher.stop_this_process_on_change()
    try:
        with _mended(watcher), startup_explained():
            code = run_worker(app, app.settings)
    finally:
        finish_logs()
    if watcher is not None and watcher.changed.is_set():
        print_note("holdfast: code changed, starting anew")
        start_anew()
    return code


def _load(session: Session, said: dict[str, str | None]) -> Holdfast:
    return session.with_tasks(
        "dev", commands="shell", log_format="pretty", job_log_level="INFO", processes=1, grace="3s", **said
    )


class _NoApi(ConfigError):
    """The API cannot be served: no change of the code mends that."""


@contextmanager
def _mended(watcher: Watcher | None) -> Iterator[None]:
    """Wraps the user's code: reports its errors and waits for a change."""
    try:
        yield
    except _NoApi:
        raise
    except ConfigError as error:
        if watcher is None:
            raise
        click.echo(f"holdfast: {safe_text(error, lines=True)}\nholdfast: waiting for a change of the code", err=True)
        watcher.wait()
        start_anew()


def _serve_beside(app: Holdfast) -> None:
    """Have the API served in the worker's event loop, from its start to its end."""
    if find_spec("uvicorn") is None or find_spec("httptools") is None:
        print_note("holdfast: without the HTTP API, which needs: pip install 'holdfast[web]'")
        return
    from holdfast.web.server import serve_in_loop

    @asynccontextmanager
    async def api(app: Holdfast) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                served = await stack.enter_async_context(serve_in_loop(app, app.settings))
            except ConfigError as error:
                raise _NoApi(f"{error}; or say --port, or --no-api") from None
            print_note(f"holdfast: the API is at {served.address}, described at {served.address}/openapi.json")
            yield

    app.lifespan(api)


def start_anew() -> NoReturn:
    """Replace this process by a fresh one with the same arguments."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "holdfast", *sys.argv[1:]])  # noqa: S606 - ourselves


class Watcher:
    """Notices when a .py file under a directory changes, comes or goes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._versions = file_versions(root)
        self._signals = threading.Lock()  # had by who waits for a change by himself
        self.changed = threading.Event()

    def has_changed(self) -> bool:
        """Returns True if something has changed since the start."""
        if file_versions(self._root) != self._versions:
            self.changed.set()
        return self.changed.is_set()

    def wait(self) -> None:
        """Return at the next change; without further signals."""
        self._signals.acquire(blocking=False)
        self._wait()

    def _wait(self) -> None:
        pause = threading.Event()
        while not self.has_changed():
            pause.wait(_LOOK)

    def stop_this_process_on_change(self) -> None:
        """Signal this process, as an operator would, once something changes."""

        def watch() -> None:
            self._wait()
            if self._signals.acquire(blocking=False):
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="holdfast-reload", daemon=True).start()


def file_versions(root: Path) -> Versions:
    """The time of the last change of every .py file under ``root`` that is likely the user's own."""
    return {str(path): when for path, when in _dated_files(root)}


def _dated_files(folder: Path) -> Iterator[tuple[Path, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # it went while we looked: that shows in the next look
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith(".") and entry.name not in _NOT_CODE:
                yield from _dated_files(Path(entry.path))
        elif entry.name.endswith(".py"):
            try:
                yield Path(entry.path), entry.stat().st_mtime_ns
            except OSError:  # the same
                continue
