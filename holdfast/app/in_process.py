"""A worker in the process of the application: ``app.worker()`` and ``app.run_worker()``.

The worker itself stands above this package: ``holdfast/__init__.py`` sets ``WorkerMethods._new_worker``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol

from holdfast.core.errors import HoldfastError, Invalid, Unavailable
from holdfast.core.events import Events, HandlersLeft
from holdfast.core.models import NewJob
from holdfast.settings.settings import Settings

Queues = str | Mapping[str, int | None]
"""Queues of a worker: ``"mail:10,default"``, or a mapping of names to the most jobs at once (None: no limit)."""

_OF_A_PROCESS = {
    "processes": "one worker runs here; enter app.worker() once for each, or use `holdfast worker start --processes N`",
    "metrics_port": "a worker in your process opens no port; serve /metrics with the HTTP API",
    "url": "a worker takes the jobs of its application; make another Holdfast(url) and use its worker()",
    "app": "a worker runs the tasks of its application; leave it out",
}
_names: set[tuple[str, str]] = set()  # stores and configured names of the workers in this process


class RunnableWorker(Protocol):
    """The part of a worker that its surroundings use."""

    id: str
    started: asyncio.Event
    stuck: int
    stuck_threads: int

    async def run(self) -> None: ...
    def stop(self, reason: str = "asked") -> None: ...
    def start_stopping(self, reason: str) -> None: ...
    def stop_now(self, reason: str = "asked") -> None: ...


NewWorker = Callable[[Any, Settings, bool], RunnableWorker]
"""Makes a worker of an application, its settings, and True if it drains the queues."""


class WorkerHost(Protocol):
    """An application as a worker in its process needs it."""

    settings: Settings
    events: Events
    under_test: bool
    _new_worker: ClassVar[NewWorker]

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *failure: object) -> None: ...


class InProcessWorker:
    """A worker that takes jobs while it is entered. On exit it stops as at SIGTERM.

    If it ends by an error, the body is cancelled and the error is raised instead.
    """

    def __init__(self, app: WorkerHost, settings: Settings, *, drain: bool = False) -> None:
        """``drain``: stop once the queues are empty."""
        self._app = app
        self._settings = settings
        self._drain = drain
        self._worker: RunnableWorker | None = None
        self._running: asyncio.Task[None] | None = None
        self._name: tuple[str, str] | None = None
        self._stop_logging: Callable[[], None] | None = None
        self._body: asyncio.Task[Any] | None = None
        self._cancellations = 0  # of the body before it was entered
        self._body_cancelled = False

    @property
    def id(self) -> str:
        """Returns the id of the worker, as ``holdfast worker list`` shows it."""
        if self._worker is None:
            raise HoldfastError("this worker has not started; enter it first: async with app.worker() as worker")
        return self._worker.id

    @property
    def is_running(self) -> bool:
        """Returns True until the worker has stopped. Always False in a test mode, where workers do not start."""
        return self._running is not None and not self._running.done()

    def stop(self) -> None:
        """Stops the worker as SIGTERM does: it claims no more jobs, and lets running ones end within the grace."""
        if self._worker is not None:
            self._worker.stop()

    async def wait(self) -> None:
        """Waits until the worker has stopped; raises the error that ended it, if any."""
        if self._running is not None:
            await asyncio.wait([self._running])
            self._running.result()

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────
    async def __aenter__(self) -> InProcessWorker:
        """Returns when the worker takes jobs; raises the error of the store or the application if it cannot start."""
        if self._running is not None:
            raise HoldfastError("this worker was entered before; call app.worker() again for another one")
        if self._app.under_test:
            return self
        from holdfast.telemetry.logs import forward_events  # programs that only submit do not need it

        await self._app.__aenter__()
        try:
            self._worker = worker = type(self._app)._new_worker(self._app, self._settings, self._drain)
            self._reserve_name(worker.id)
            self._stop_logging = forward_events(self._app.settings, self._app.events)
            self._running = asyncio.create_task(worker.run(), name=f"holdfast-worker-{worker.id}")
            await self._wait_started(worker, self._running)
        except BaseException:
            await self._close()
            raise
        self._body = asyncio.current_task()
        self._cancellations = 0 if self._body is None else self._body.cancelling()
        self._running.add_done_callback(self._cancel_body)
        return self

    def _reserve_name(self, worker_id: str) -> None:
        """Raises Unavailable if a worker of this process has the configured name: the store cannot tell them apart."""
        name = (self._settings.url, worker_id)
        if name in _names:
            raise Unavailable(
                f"worker_id: {worker_id} is the name of another worker in this process; give this one another name, "
                "or none"
            )
        _names.add(name)
        self._name = name

    @staticmethod
    async def _wait_started(worker: RunnableWorker, running: asyncio.Task[None]) -> None:
        started = asyncio.ensure_future(worker.started.wait())
        try:
            await asyncio.wait([started, running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
        if running.done():
            running.result()

    def _cancel_body(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and running.exception() is not None and self._body is not None:
            self._body_cancelled = self._body.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        body, self._body = self._body, None
        was_cancelled = self._body_cancelled
        if was_cancelled and body is not None:
            cancelled_by_others = body.uncancel() > self._cancellations
            was_cancelled = not cancelled_by_others and isinstance(error, asyncio.CancelledError)
        await self._close()
        running = self._running
        if running is not None and not running.cancelled() and (failure := running.exception()) is not None:
            if was_cancelled:
                raise failure from None
            if error is None:
                raise failure

    async def _close(self) -> None:
        try:
            await self._finish()
        finally:
            if self._name is not None:
                _names.discard(self._name)
            if self._stop_logging is not None:
                self._stop_logging()
            await self._app.__aexit__()

    async def _finish(self) -> None:
        """Stops the worker and waits for its end. A cancellation meanwhile ends the grace."""
        worker, running = self._worker, self._running
        if worker is None or running is None:
            return
        cancelled: asyncio.CancelledError | None = None
        if not running.done():
            worker.start_stopping("exited")
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                worker.stop_now("exited")
                cancelled = error
        if worker.stuck or worker.stuck_threads:
            left = HandlersLeft(worker_id=worker.id, threads=worker.stuck_threads, coroutines=worker.stuck)
            self._app.events.emit(left)
        if cancelled is not None:
            raise cancelled


class WorkerMethods:
    """Methods of an application that run a worker in its process."""

    under_test = False
    """True in a test mode, which decides itself whether and when jobs run."""
    is_inline = False
    """True in the test mode that runs each job once, when it is enqueued."""
    _new_worker: ClassVar[NewWorker]

    def _run_test_loop(self, call: Coroutine[Any, Any, None]) -> None:
        """Runs the jobs of a test mode for a blocking caller. An integration may keep the caller's thread free."""
        asyncio.run(call)

    def _waiting_jobs(self) -> Sequence[NewJob]:
        """Returns the jobs of this test mode that wait for the commit of a transaction, so that no store has them."""
        return ()

    def _waiting_jobs_hint(self) -> str:
        """Sentence for a failed assertion about jobs that wait for the commit of a transaction."""
        return ""

    def _new_test_threads(self) -> Any:
        """Returns an executor for the ``def`` handlers of test modes; None: threads of their own, as in a worker."""
        return None

    def worker(
        self: WorkerHost, *, queues: Queues | None = None, concurrency: int | None = None, **settings: Any
    ) -> InProcessWorker:
        """Returns a worker for this event loop: ``async with app.worker(queues="mail:10,default", concurrency=20):``.

        It works while entered. On exit it stops as at SIGTERM: it claims no more jobs, lets running ones end within
        the grace, and gives the rest back. Further arguments are settings, such as ``grace="5s"``.
        """
        return InProcessWorker(self, _worker_settings(self.settings, queues, concurrency, settings))

    async def run_worker(
        self: WorkerHost,
        *,
        queues: Queues | None = None,
        concurrency: int | None = None,
        drain: bool = False,
        **settings: Any,
    ) -> None:
        """Runs a worker in this event loop until it is cancelled or asked to stop, or, with ``drain``, until its
        queues are empty. Arguments as for ``worker``."""
        if not isinstance(drain, bool):
            raise Invalid("drain", drain, "give True to stop when the queues are empty, else False")
        chosen = _worker_settings(self.settings, queues, concurrency, settings)
        async with InProcessWorker(self, chosen, drain=drain) as worker:
            await worker.wait()


def _worker_settings(
    settings: Settings, queues: Queues | None, concurrency: int | None, others: Mapping[str, object]
) -> Settings:
    for name, remedy in _OF_A_PROCESS.items():
        if others.get(name) is not None:
            raise Invalid(name, others[name], remedy, "does not go with a worker in your own process")
    chosen = {"queues": dict(queues) if isinstance(queues, Mapping) else queues, "concurrency": concurrency, **others}
    return settings.replace_values(**{name: value for name, value in chosen.items() if value is not None})
