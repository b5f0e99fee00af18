"""Functions for the children of the process executor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from holdfast.tasks import Task


def _in_a_child(function: Callable[..., Any]) -> Task[..., Any]:
    return Task(function.__name__, function, executor="process")


@_in_a_child
def echo(n: int) -> int:
    """The number again."""
    return n


@_in_a_child
def hang(n: int) -> None:
    """Longer than any benchmark waits."""
    time.sleep(300 + n)
