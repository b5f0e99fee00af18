"""Limits and sandbox of one command: planned here, put up by a launcher that then becomes the command.

plan.py       the launcher's orders; which mechanisms this host has
seccomp.py    the filter of system calls
launcher.py   a script of its own: limits, namespaces, Landlock, the filter, then the command
"""

from holdfast.worker.sandbox.plan import (
    LANDLOCK,
    NAMESPACES,
    SANDBOX_REMEDY,
    CommandHost,
    Launch,
    Mechanism,
    NoSandbox,
    Orders,
    describe_host,
    landlock_version,
)

__all__ = [
    "LANDLOCK",
    "NAMESPACES",
    "SANDBOX_REMEDY",
    "CommandHost",
    "Launch",
    "Mechanism",
    "NoSandbox",
    "Orders",
    "describe_host",
    "landlock_version",
]
