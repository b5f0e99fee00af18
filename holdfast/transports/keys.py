"""Names of a transport's keys."""

from __future__ import annotations

from typing import NamedTuple


class TransportKeys(NamedTuple):
    """Of the queue ``default``; another queue's name is appended after a colon."""

    key: str
    dead_key: str

    def ready(self, queue: str) -> str:
        """The key of what is ready in a queue."""
        return _of(self.key, queue)

    @property
    def malformed(self) -> str:
        """The key of the stream of messages that held no job id."""
        return f"{self.key}@malformed"

    def dead_letter_key(self, queue: str) -> str:
        """The key of a queue's dead letters."""
        return _of(self.dead_key, queue)


def _of(key: str, queue: str) -> str:
    return key if queue == "default" else f"{key}:{queue}"
