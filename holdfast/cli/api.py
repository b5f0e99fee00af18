"""``api``: the HTTP API. ``dev``: API and worker that restart with the code. ``audit``: verifies an audit file."""

from __future__ import annotations

import asyncio
import contextlib
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
from holdfast.cli.base import add_command, add_group
from holdfast.cli.context import Session, store_of, url_source
from holdfast.cli.output import print_json, print_note
from holdfast.core.errors import ConfigError, Unavailable
from holdfast.views.formatting import count_noun, safe_text


@add_command("api", examples=["holdfast api", "holdfast api --app shop.jobs:app --port 8080"])
@click.option("--host", "api_host", metavar="ADDRESS", help="The address to listen on [127.0.0.1].")
@click.option("--port", "api_port", metavar="N", help="The port; 0 takes a free one [8000].")
@click.option("--exposed", is_flag=True, help="Serve other hosts without keys: who reaches the port may do anything.")
@click.pass_obj
def api(session: Session, *, api_host: str | None, api_port: str | None, exposed: bool) -> int:
    """Serve the HTTP API, and the console, until stopped.

    An application is not needed; where one is named, its tasks check payloads before they are stored. SIGTERM and
    Ctrl-C let requests under way finish within the grace, a second signal more than a second later ends at once.
    """
    from holdfast.telemetry.logs import configure_logs
    from holdfast.web.server import serve

    app = session.load(api_host=api_host, api_port=api_port)
    for warning in (*app.settings.warnings, *_warnings(app)):
        print_note(f"warning: {warning}")
    finish_logs = configure_logs(app.settings, app.events)
    try:
        return serve(app, app.settings, exposed=exposed)
    finally:
        finish_logs()


def _warnings(app: Holdfast) -> Iterator[str]:
    """Yields a warning for each risky setting."""
    from holdfast.web.keys_file import read_keys

    with contextlib.suppress(Unavailable):  # the API starts without its store, too
        if asyncio.run(app.new_store().missing()) is not None:
            yield f"this makes a new database: {store_of(app)} (url from {url_source(app)})"
    file = app.settings.keys_file
    if file is not None and not read_keys(Path(file)):
        yield f"{file} has no key, so no caller is let in: `holdfast keys create` makes keys"


@add_group("audit")
def audit() -> None:
    """Check the file of changes made over the HTTP API."""


@audit.command(
    "verify",
    examples=["holdfast audit verify audit.jsonl", "holdfast audit verify audit.2.jsonl --after HASH_OF_AUDIT_1"],
)
@click.argument("file", metavar="FILE", required=False)
@click.option("--expect", "expected", metavar="HASH", help="A hash noted earlier that must be in the chain.")
@click.option("--after", metavar="HASH", default="", help="The last hash of the file that was put aside before.")
@click.pass_obj
def audit_verify(session: Session, *, file: str | None, expected: str | None, after: str) -> int:
    """Check the file's chain of hashes [audit_file]. Prints how many lines it has, and the last hash.

    Note that hash elsewhere: later, --expect HASH shows that nothing up to there was cut off or written anew. A file
    that is not whole ends with exit code 1.
    """
    from holdfast.telemetry.audit_file import AuditBroken, verify

    path = file if file is not None else session.settings().audit_file
    if path is None:
        raise ConfigError("no audit file is named: give its path, or set audit_file")
    found = verify(Path(path), expected, after)
    if not found.found:
        raise AuditBroken(f"{path}: no entry has the hash {str(expected)[:64]}: entries are missing")
    if session.json:
        print_json({"entries": found.entries, "last": found.last})
    else:
        click.echo(f"{count_noun(found.entries, 'line')}, whole; the last hash is {found.last or '-'}")
    return 0


# ── holdfast dev ──────────────────────────────────────────────────────────────────────────────────────────────────────
_POLL = 0.5  # seconds between checks of the files
_NOT_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"})

Versions = dict[str, int]


@add_command("dev", examples=["holdfast dev --app shop.jobs:app", "holdfast dev --queues mail --port 8080 --no-reload"])
@click.option("--queues", "-Q", metavar="LIST", help="Which queues to serve [*].")
@click.option("--concurrency", "-c", metavar="N", help="Jobs to run at once [10].")
@click.option("--port", "api_port", metavar="N", help="The API's port on this host; 0 takes a free one [8000].")
@click.option("--api/--no-api", default=True, show_default=True, help="Serve the HTTP API beside the worker.")
@click.option("--reload/--no-reload", default=True, show_default=True, help="Start anew when a .py file changes.")
@click.pass_obj
def develop(session: Session, /, *, api: bool, reload: bool, **given: str | None) -> int:
    """Run API, console and worker in one process, to develop.

    Command jobs are enabled and logs are readable. When a .py file under the working directory changes it starts anew,
    with the new code. Broken code is reported, and the next change tries again. Ctrl-C ends both.
    """
    from holdfast.cli.loading import startup_explained
    from holdfast.telemetry.logs import configure_logs
    from holdfast.worker import run_worker

    watcher = Watcher(Path.cwd()) if reload else None
    with _mended(watcher):
        app = _load(session, given)
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


def _load(session: Session, given: dict[str, str | None]) -> Holdfast:
    return session.with_tasks(
        "dev", commands="shell", log_format="pretty", job_log_level="INFO", processes=1, grace="3s", **given
    )


class _NoApi(ConfigError):
    """The API cannot be served, and a change of the code would not help."""


@contextmanager
def _mended(watcher: Watcher | None) -> Iterator[None]:
    """Wraps the user's code: reports an error and waits for a change of a file."""
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
    """Serves the API in the worker's event loop while the worker runs."""
    if find_spec("uvicorn") is None or find_spec("httptools") is None:
        print_note("holdfast: without the HTTP API, which needs: pip install 'holdfast[web]'")
        return
    from holdfast.web.server import serve_in_loop

    @asynccontextmanager
    async def api(app: Holdfast) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                served = await stack.enter_async_context(serve_in_loop(app, app.settings, local_console=True))
            except ConfigError as error:
                raise _NoApi(f"{error}; or say --port, or --no-api") from None
            print_note(f"holdfast: the API is at {served.address}, described at {served.address}/openapi.json")
            print_note(f"holdfast: the console is at {served.address}/console")
            yield

    app.lifespan(api)


def start_anew() -> NoReturn:
    """Replaces this process by a new one with the same arguments."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


class Watcher:
    """Detects changed, new and removed .py files under a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._versions = file_versions(root)
        self._signals = threading.Lock()  # held by the thread that waits for a change
        self.changed = threading.Event()

    def has_changed(self) -> bool:
        """Returns True if something has changed since the start."""
        if file_versions(self._root) != self._versions:
            self.changed.set()
        return self.changed.is_set()

    def wait(self) -> None:
        """Waits for the next change; sends no signals afterwards."""
        self._signals.acquire(blocking=False)
        self._wait()

    def _wait(self) -> None:
        pause = threading.Event()
        while not self.has_changed():
            pause.wait(_POLL)

    def stop_this_process_on_change(self) -> None:
        """Sends this process a stop signal after the first change."""

        def watch() -> None:
            self._wait()
            if self._signals.acquire(blocking=False):
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="holdfast-reload", daemon=True).start()


def file_versions(root: Path) -> Versions:
    """Returns the modification time of every .py file under ``root`` that probably belongs to the user."""
    return {str(path): when for path, when in _dated_files(root)}


def _dated_files(folder: Path) -> Iterator[tuple[Path, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # removed during the scan: detected by the next one
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
