"""The running job as its handler sees it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.job import Job


class Context:
    """The running job. A handler whose first parameter is annotated ``Context`` gets it; ``current_job()`` too."""

    __slots__ = ("job", "cancelled")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.cancelled = False
        """True once the job is asked to stop. A handler in a thread looks here; a coroutine is cancelled anyway."""

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def attempts(self) -> int:
        """Attempts so far, this one included: 1 in the first."""
        return self.job.attempts

    @property
    def max_attempts(self) -> int | None:
        """How many attempts there may be; None: no limit."""
        return self.job.max_attempts

    @property
    def claims(self) -> int:
        """The fencing token: grows with every claim of this job.

        A system that remembers the highest one can refuse a stale worker.
        """
        return self.job.claims

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the submitter attached."""
        return self.job.carried.metadata or {}

    @property
    def tags(self) -> tuple[str, ...]:
        return self.job.carried.tags

    def cancel(self) -> None:
        """Called by the worker: ask the handler to stop."""
        self.cancelled = True


CURRENT: ContextVar[Context] = ContextVar("holdfast_current_job")
"""Set by whoever runs a handler, inside that handler's own context."""


def current_job() -> Context:
    """The job this code runs for."""
    try:
        return CURRENT.get()
    except LookupError:
        raise HoldfastError(
            "current_job(): no job is running here; call it inside a handler, or hand the value over as an argument "
            "(a thread started by hand does not inherit it: start it with contextvars.copy_context().run)"
        ) from None
