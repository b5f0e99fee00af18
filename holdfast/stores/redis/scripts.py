"""The Lua scripts: each is one step that happens whole, for a batch."""

from __future__ import annotations

from importlib.resources.abc import Traversable

from holdfast.stores.connections.redis import Script, script_of

SHARED = ("common", "moving", "taking")
"""Pieces that others begin with, no scripts themselves."""
_MOVING = ("claim", "deliver", "settle", "promote", "operate", "prune")
_TAKING = ("claim", "deliver")


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
        scripts[name] = script_of(name, whole)
    return scripts
