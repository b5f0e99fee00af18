"""How a process of a benchmark talks with the one that started it: lines of JSON out, words in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def say(figures: dict[str, Any]) -> None:
    """Tell the other side."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def listen(figures: Callable[[], dict[str, Any]]) -> None:
    """Answer each ``mark`` with the figures of the moment; return at any other word, or when the input ends."""
    for line in sys.stdin:
        if line.strip() != "mark":
            return
        say(figures())
