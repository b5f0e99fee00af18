"""The application: Atlas Jobs' settings, and a task for each kind of work it is meant for.

A job of Atlas has one payload, a text, so every task takes one argument of that name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import urllib.request
from email.message import EmailMessage
from pathlib import Path
from urllib.parse import urlsplit

from holdfast import Context, Dead, Holdfast, Settings
from holdfast.settings.settings import SETTINGS

SERVER_PORT = "SERVER_PORT"


def _server_port() -> int | None:
    text = os.environ.get(SERVER_PORT)
    return SETTINGS["api_port"].kind.parse(SERVER_PORT, text) if text else None


app = Holdfast(
    settings=Settings.load(
        path=Path(__file__).parents[1] / "holdfast.toml",
        worker_id=os.environ.get("ATLAS_WORKER_ID") or None,
        api_port=_server_port(),
    )
)


@app.task("email.send")
def send_email(payload: str) -> str:
    """``{"to": …, "subject": …}``: compose a message. Hand it to your own mail server here."""
    wanted = json.loads(payload)
    message = EmailMessage()
    message["To"], message["Subject"] = wanted["to"], wanted["subject"]
    return message.as_string()


@app.task("payment.charge")
def charge(ctx: Context, payload: str) -> dict[str, object]:
    """``{"amount": …}``: a receipt. The job's id is the same in every attempt: a provider charges it once."""
    amount = json.loads(payload)["amount"]
    if amount <= 0:
        raise Dead(f"amount {amount} cannot be charged")
    return {"charge": ctx.id, "amount": amount}


@app.task("file.process")
def process_file(payload: str) -> str:
    """``{"path": …}``: the SHA-256 of a file. One that is not there yet may be there at the next attempt."""
    return hashlib.sha256(Path(json.loads(payload)["path"]).read_bytes()).hexdigest()


@app.task("api.call", timeout=30)
def call_api(payload: str) -> int:
    """``{"url": …}``: the HTTP status that it answers with; anything from 400 on is a failure."""
    url = json.loads(payload)["url"]
    if urlsplit(url).scheme not in ("http", "https"):
        raise Dead(f"{url} is no HTTP address")
    with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - the scheme was checked
        status: int = answer.status
    return status


@app.task("event.handle")
async def handle_event(ctx: Context, payload: str) -> list[str]:
    """``{"event": …, "handlers": […]}``: one job for each that handles it, with a key of its own.

    The key rests on this job's id: another attempt submits nothing twice, another event of that name is handled, too.
    """
    handlers: list[str] = json.loads(payload)["handlers"]
    for name in handlers:
        await app.enqueue(name, {"payload": payload}, key=f"{ctx.id}/{name}")
    return handlers


@app.task("demo.sleep")
async def sleep(payload: str) -> None:
    """``{"seconds": …}``: take that long."""
    await asyncio.sleep(json.loads(payload)["seconds"])


@app.task("demo.fail")
async def fail(ctx: Context, payload: str) -> str:
    """``{"message": …, "times": …}``: fail that often, then succeed; without ``times``, always."""
    wanted = json.loads(payload)
    if ctx.attempts <= wanted.get("times", ctx.attempts):
        raise RuntimeError(wanted["message"])
    return "recovered"
