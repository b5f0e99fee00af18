"""Limits and sandbox of one command: a launcher sets them up, then becomes the command.

plan.py       the launcher's input; the sandbox mechanisms of this host
seccomp.py    the filter of system calls
launcher.py   a standalone script: limits, namespaces, Landlock, the filter, then the command
"""

from holdfast.worker.sandbox.plan import (
    LANDLOCK,
    NAMESPACES,
    SANDBOX_REMEDY,
    CommandHost,
    Launch,
    LaunchSpec,
    Mechanism,
    NoSandbox,
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
    "LaunchSpec",
    "describe_host",
    "landlock_version",
]
