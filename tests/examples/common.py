"""What the tests of several examples do: wait, and ask over HTTP."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

PATIENCE = 90.0
"""Seconds to wait for what is a matter of moments on an idle machine."""


def until(holds: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Look again and again until ``holds`` says something true; fail when it takes too long."""
    deadline = time.monotonic() + seconds
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"{what} has not come about within {seconds} s"
        time.sleep(0.02)
    return answer


def quickest(call: Callable[[], Any], within: float, times: int = 5) -> float:
    """Returns the seconds that the quickest of several calls takes; stops at the first one that took no longer than
    ``within``. A busy machine only ever makes a call slower: the quickest shows how long the program itself waits."""
    best = float("inf")
    for _ in range(times):
        began = time.monotonic()
        call()
        best = min(best, time.monotonic() - began)
        if best <= within:
            break
    return best


def asked(request: urllib.request.Request) -> tuple[int, bytes]:
    """Status and body of the answer to a request on a connection of its own, whatever the status says."""
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:  # noqa: S310 - ours, on this host
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
