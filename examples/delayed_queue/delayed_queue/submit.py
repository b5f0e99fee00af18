"""The submit client: a batch of jobs for the HTTP API, due at random moments of a window."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from delayed_queue.app import app
from holdfast import ConfigError, Unavailable

T = TypeVar("T", int, float)

LEAD = 0.5
"""Seconds after its submission at which a job is due at the earliest: what is still on its way is not yet due."""
_CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}
_KINDS = {int: "a whole number", float: "a number"}


def submit_jobs() -> Iterator[str]:
    """Submit JOB_COUNT jobs that fall due within TIME_OFFSET_SEC seconds from now; the id of each as it is accepted."""
    count, window = _number("JOB_COUNT", 10, most=1_000_000), _number("TIME_OFFSET_SEC", 10.0, most=366 * 86_400)
    address = os.environ.get("API_URL") or _own_address()
    connection, path = _connection(address)
    try:
        for number in range(count):
            due = time.time() + LEAD + random.uniform(0, window)
            wanted = {"payload": f"job {number}", "dueTime": round(due * 1_000_000)}
            connection.request("POST", path, json.dumps(wanted), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            reply = _reply(answer.read())
            if answer.status == 200 and "jobId" in reply:
                yield reply["jobId"]
            else:
                raise Unavailable(f"job {number} was refused: {reply.get('detail', f'{address} is another server')}")
    except (OSError, HTTPException) as error:
        raise Unavailable(f"{address} does not answer ({error}); start it, or say where it is with API_URL") from None
    finally:
        connection.close()


def _own_address() -> str:
    """Returns the address of the server that has these settings."""
    host = app.settings.api_host
    return f"http://{f'[{host}]' if ':' in host else host}:{app.settings.api_port}"


def _connection(address: str) -> tuple[HTTPConnection, str]:
    """A connection that is not yet open, and the path of the jobs; ConfigError where the address is none."""
    try:
        url = urlsplit(address)
        kind = _CONNECTIONS[url.scheme]
        if url.hostname and url.username is None and not url.query:
            return kind(url.hostname, url.port, timeout=30), f"{url.path.rstrip('/')}/jobs"
    except (ValueError, KeyError, HTTPException):
        pass
    raise ConfigError(f"API_URL: {address!r} is not valid; give http://HOST:PORT or https://HOST:PORT")


def _reply(body: bytes) -> dict[str, Any]:
    """The object that the server answered; empty where it is none."""
    try:
        reply = json.loads(body)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def _number(name: str, default: T, *, most: int) -> T:
    """What an environment variable says, a number of the default's kind."""
    text = os.environ.get(name) or str(default)
    try:
        number = type(default)(text)
    except ValueError:
        number = type(default)(-1)
    if not 0 <= number <= most:
        raise ConfigError(f"{name}: {text!r} is not valid; give {_KINDS[type(default)]} from 0 to {most:,}")
    return number
