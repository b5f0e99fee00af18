"""Waiters for topics in this process, shared by the stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

_MISSED_MOST = 1000  # topics kept for the next waiter; a process that only submits has many


class Waiter:
    """A call of ``wait``."""

    __slots__ = ("topics", "wake")

    def __init__(self, topics: frozenset[str], wake: Callable[[], object]) -> None:
        self.topics = topics
        self.wake = wake

    def matches_topics(self, named: Iterable[str]) -> bool:
        """Returns True if one of these topics is for this waiter."""
        return any(
            topic in self.topics or (topic.endswith(":*") and self._wants(topic[:-1])) or self._any_of(topic)
            for topic in named
        )

    def _wants(self, kind: str) -> bool:
        return any(topic.startswith(kind) for topic in self.topics)

    def _any_of(self, topic: str) -> bool:
        return topic[: topic.index(":") + 1] + "*" in self.topics


class PendingTopics:
    """Notifications of queues and workers without a waiter, kept for the next one. Its owner has the lock."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def keep_topics(self, topics: Iterable[str]) -> None:
        """Keeps topics that no waiter took; ends of jobs are found by a look at the store. The ending of a job is seen
        by looking.
        """
        self._topics.update(topic for topic in topics if not topic.startswith("job:"))
        if len(self._topics) > _MISSED_MOST:
            self._topics = {"queue:*", "worker:*", "due:*"}

    def take(self, waiter: Waiter) -> bool:
        """Returns True if there was a notification for this waiter, and removes it."""
        missed = {topic for topic in self._topics if waiter.matches_topics((topic,))}
        self._topics -= missed
        return bool(missed)


class Waiters:
    """The waiters of this process. Notifications without a waiter are kept for the next one."""

    def __init__(self) -> None:
        self._listed: set[Waiter] = set()
        self._missed = PendingTopics()
        self._lock = threading.Lock()

    def wake_topics(self, topics: Iterable[str]) -> None:
        """Wakes the waiters for one of these. From any thread, if their ``wake`` may be called from there."""
        named = [topic for topic in topics if ":" in topic]
        if not named:
            return
        with self._lock:
            heard = [waiter for waiter in self._listed if waiter.matches_topics(named)]
            if not heard:
                self._missed.keep_topics(named)
        for waiter in heard:
            waiter.wake()

    @contextmanager
    def register_waiter(self, waiter: Waiter) -> Iterator[None]:
        """Registers the waiter while entered; it gets missed notifications at once."""
        with self._lock:
            self._listed.add(waiter)
            missed = self._missed.take(waiter)
        if missed:
            waiter.wake()
        try:
            yield
        finally:
            with self._lock:
                self._listed.discard(waiter)
