"""The Lua scripts: each is one step that happens whole, for a batch."""

from __future__ import annotations

import hashlib
from importlib.resources.abc import Traversable
from typing import NamedTuple

SHARED = ("common", "moving", "taking")
"""Pieces that others begin with, no scripts themselves."""
_MOVING = ("claim", "deliver", "settle", "promote", "operate", "prune")
_TAKING = ("claim", "deliver")


class Script(NamedTuple):
    """One script as the server knows it."""

    name: str
    text: str
    sha: str


def load_scripts(directory: Traversable) -> dict[str, Script]:
    """The scripts of a folder by name, each with what it begins with."""
    texts = {
        entry.name.removesuffix(".lua"): entry.read_text(encoding="utf-8")
        for entry in directory.iterdir()
        if entry.name.endswith(".lua")
    }
    common, moving, taking = (texts.pop(name) for name in SHARED)
    scripts = {}
    for name, text in texts.items():
        whole = common + (moving if name in _MOVING else "") + (taking if name in _TAKING else "") + text
        scripts[name] = Script(name, whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())
    return scripts
