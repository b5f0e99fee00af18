"""Recipes of the documentation: redirects, busy receivers, shared files, and blocks typed as the cookbook says."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from holdfast import Job
from tests.support.pages import ROOT, Block, Reader, blocks, check_session, find_modules
from tests.support.postgres import shared
from tests.support.servers import PATIENCE


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``app`` of the page that the test names."""
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, "page_of_a_recipe")
    try:
        reader.run(blocks((ROOT / request.param).read_text(encoding="utf-8"))[0])
        yield importlib.import_module("app")
    finally:
        reader.close()


def page_of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("recipe", [name], indirect=True)


class _Receiver(ThreadingHTTPServer):
    """Answers each POST with the given status and headers, and each GET with 200."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/hook"

    def __enter__(self) -> _Receiver:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture
def recipe_server(recipe: ModuleType) -> Iterator[None]:
    yield
    recipe.server.shutdown()
    recipe.server.server_close()


async def _deliver(recipe: ModuleType, receiver: _Receiver) -> list[Job]:
    """Returns two deliveries to it after a worker had nothing more to do."""
    async with recipe.app as app:
        handles = [await recipe.deliver.enqueue(receiver.url, "{}") for _ in range(2)]
        await app.run_worker(drain=True, concurrency=1)
        return [await handle.job() for handle in handles]


@page_of("docs/webhooks.md")
@pytest.mark.usefixtures("recipe_server")
@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirected_delivery_is_not_received(recipe: ModuleType, status: int) -> None:
    with _Receiver(status, {"Location": "/new"}) as receiver:
        jobs = asyncio.run(_deliver(recipe, receiver))
    assert {job.state for job in jobs} == {"failed"}
    assert all((job.error or "").startswith(f"HTTPError: HTTP Error {status}") for job in jobs)


@page_of("docs/webhooks.md")
@pytest.mark.usefixtures("recipe_server")
@pytest.mark.parametrize("header", ["0", "9" * 400, "soon", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_delivery_that_finds_its_receiver_busy_waits(recipe: ModuleType, header: str) -> None:
    with _Receiver(429, {"Retry-After": header}) as receiver:
        jobs = asyncio.run(_deliver(recipe, receiver))
    assert "dead" not in {job.state for job in jobs}
    errors = [job.error for job in jobs if job.error]
    assert errors
    assert all(error.startswith("RetryAfter: the receiver is busy") for error in errors)


@page_of("docs/webhooks.md")
@pytest.mark.usefixtures("recipe_server")
def test_a_receiver_that_is_busy_until_a_date_is_paused(recipe: ModuleType) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(minutes=50), usegmt=True)
    with _Receiver(429, {"Retry-After": date}) as receiver:
        jobs = asyncio.run(_deliver(recipe, receiver))
    assert [job.state for job in jobs] == ["failed", "queued"]


@page_of("docs/files.md")
def test_two_jobs_of_a_worker_write_one_file(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Barrier(2)
    rename = Path.replace

    def rename_once_both_wrote(part: Path, target: Path) -> Path:
        written.wait(60)
        return rename(part, target)

    monkeypatch.setattr(Path, "replace", rename_once_both_wrote)
    trouble: list[BaseException] = []

    def write(content: bytes) -> None:
        try:
            recipe.write_whole(Path("target"), content)
        except OSError as error:
            trouble.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in (b"one", b"three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trouble == []
    assert Path("target").read_bytes() in (b"one", b"three")


@page_of("docs/files.md")
def test_a_write_that_fails_leaves_no_part(recipe: ModuleType) -> None:
    target = Path("folder")
    target.mkdir()
    with pytest.raises(IsADirectoryError):
        recipe.write_whole(target, b"content")
    assert [path.name for path in Path().iterdir() if path.name.startswith(".folder")] == []


def test_the_page_of_flask_is_true_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path}/jobs.db")
    reader = Reader(tmp_path, "page_of_flask")
    try:
        module, *rest = [
            block for block in blocks((ROOT / "docs/flask.md").read_text("utf-8")) if block.kind == "python"
        ]
        reader.run(module)
        reader.run(Block("sh", "holdfast migrate --app shop:app\n", 0))
        for block in rest:
            reader.run(block)
    finally:
        reader.close()


def test_a_worker_of_the_file_on_the_page_of_sqlmodel_knows_all_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", shared().url(shared().create_database()))
    reader = Reader(tmp_path, "page_of_sqlmodel")
    try:
        module, *rest = [
            each for each in blocks((ROOT / "docs/sqlmodel.md").read_text("utf-8")) if each.kind == "python"
        ]
        for block in (module, Block("sh", "holdfast worker start --app shop:app &\n", 0), *rest):
            reader.run(block)
    finally:
        reader.close()


# ── as the cookbook says ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["emails", "files", "payments", "etl", "webhooks"])
def test_recipes_run_where_the_cookbook_puts_them(name: str, tmp_path: Path) -> None:
    """Files are written; all other blocks are typed into ``python -m asyncio``, an empty line behind each."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    files = find_modules(page)
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    typed = [block for block in blocks(page) if block.kind == "python" and block.text not in files.values()]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    ran = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT)},
        input="".join(f"{block.text}\n" for block in typed),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "<console>" not in ran.stderr, ran.stderr
    check_session(typed, ran.stdout)
