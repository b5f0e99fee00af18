"""A plugin of pytest, ``-p tests.examples.no_servers``: no test reaches a server, nor starts a program."""

from __future__ import annotations

import sys
from typing import Any

_NEEDED = ("socket.connect", "subprocess.Popen")


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Addresses of the network are pairs; those of sockets within this host are not."""
    if event in _NEEDED and (event == "subprocess.Popen" or isinstance(arguments[1], tuple)):
        raise AssertionError(f"{event} {arguments[:2]}: this layer of tests needs no server")


sys.addaudithook(_refuse)
