"""Receivers of alerts: a webhook, or a program. Each attempt is bounded in time, and no problem names a secret."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from holdfast.core.errors import HoldfastError
from holdfast.settings.settings import Settings
from holdfast.tasks.command_policy import CommandPayload, command_policy

SEND_SECONDS = 10.0
"""Longest time for one message."""
_CLOSE_SECONDS = 1.0


class NotSent(HoldfastError):
    """A message was not taken by its receiver."""


class NoAnswer(NotSent):
    """A message may have arrived, but its receiver did not say so."""


async def send_message(settings: Settings, message: Mapping[str, Any]) -> None:
    """Sends a message to the receiver of the settings; without one it is a line of the log alone. Raises `NotSent`."""
    body = msgspec.json.encode(message)
    try:
        async with asyncio.timeout(SEND_SECONDS):
            if settings.alert_webhook is not None:
                await _post(settings.alert_webhook, body)
            elif settings.alert_command is not None:
                await _run_program(settings, settings.alert_command, body)
    except TimeoutError:
        raise NoAnswer(f"{describe_receiver(settings)} took longer than {SEND_SECONDS:g} s") from None
    except OSError as error:
        cause = error.strerror or type(error).__name__
        raise NotSent(f"{describe_receiver(settings)} cannot be used: {cause}") from None


def describe_receiver(settings: Settings) -> str:
    """Returns the receiver of alerts for messages, without secrets."""
    if settings.alert_webhook is not None:
        return f"alert_webhook {settings.describe_setting('alert_webhook').text}"
    if settings.alert_command is not None:
        return f"alert_command {settings.alert_command[0]}"
    return "the log"


async def _post(url: str, body: bytes) -> None:
    """Posts JSON over a connection of its own. The answer is its first line: redirects are not followed."""
    parts = urlsplit(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (80 if tls is None else 443)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
    try:
        writer.write(_request_head(url, len(body)) + body)
        await writer.drain()
        status = (await reader.readuntil(b"\n")).split(b" ", 2)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionResetError):
        status = []
    except BaseException:
        writer.transport.abort()  # closing it would wait until all is sent
        raise
    writer.close()
    with suppress(TimeoutError, OSError):  # the answer is there; its receiver may be slow to close
        async with asyncio.timeout(_CLOSE_SECONDS):
            await writer.wait_closed()
    if len(status) < 2 or not status[0].startswith(b"HTTP/1."):
        raise NoAnswer("alert_webhook did not answer in HTTP")
    if not status[1].startswith(b"2"):
        code = status[1][:3].decode("ascii", "replace")
        hint = "; redirects are not followed: give the URL to which it leads" if code.startswith("3") else ""
        raise NotSent(f"alert_webhook answered {code}{hint}")


def _request_head(url: str, length: int) -> bytes:
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    lines = [
        f"POST {parts.path or '/'}{'?' if parts.query else ''}{parts.query} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "User-Agent: holdfast",
        "Connection: close",
    ]
    if user:
        lines.append(f"Authorization: Basic {base64.b64encode(unquote(user).encode()).decode()}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


async def _run_program(settings: Settings, words: tuple[str, ...], body: bytes) -> None:
    """Runs the program in a session of its own, with the environment of command jobs. It is killed when time is up."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=command_policy(settings).environment_for(CommandPayload()),
        start_new_session=True,
    )
    try:
        await process.communicate(body)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise NotSent(f"alert_command {words[0]} ended with {process.returncode}")
