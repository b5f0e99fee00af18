"""The reloader: applies changes of the settings file, and recycles the process at its limits of jobs and memory."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.app.limits import merge_limits
from holdfast.core.errors import ConfigError
from holdfast.core.events import SettingsChanged, SettingsRefused
from holdfast.settings.settings import Watch
from holdfast.worker.context import WorkerState
from holdfast.worker.executors.process_group import resident_bytes

_CHECK_INTERVAL = 2.0  # seconds; settings are followed within 5
_NOT_RECYCLED = (
    "recycle_jobs, recycle_memory: no supervisor would start the next worker, so this one goes on; start it anew by "
    "`holdfast worker start`, which supervises what is to be recycled"
)


class Reloader:
    """Checks the settings file, the number of finished jobs and the resident memory."""

    def __init__(self, shared: WorkerState, resize: Callable[[int], None], recycle: Callable[[], None] | None) -> None:
        """``recycle``: None without a supervisor, which would start the next process."""
        self._shared = shared
        self._resize = resize
        self._recycle = recycle
        self._watch = Watch(shared.settings)
        self._warned = False

    async def run(self) -> None:
        """Checks every two seconds until the process is recycled."""
        shared = self._shared
        while True:
            await shared.clock.sleep(_CHECK_INTERVAL)
            self._reload()
            if self._recycle is None:
                self._warn()
            elif self._should_recycle():
                self._recycle()
                return

    def _reload(self) -> None:
        shared = self._shared
        try:
            newer = self._watch.poll_changes()
            if newer is not None:
                shared.app.limits.check_declared(merge_limits(shared.app.declared_limits, newer))
        except ConfigError as error:
            shared.emit(SettingsRefused(problem=str(error)))
            return
        if newer is None:
            return
        shared.emit(SettingsChanged(changed=shared.settings.changed_values(newer)))
        shared.apply_settings(newer)
        self._resize(newer.concurrency)
        shared.may_fetch.set()

    def _warn(self) -> None:
        shared = self._shared
        if not self._warned and shared.settings.recycles:
            self._warned = True
            shared.emit(SettingsRefused(problem=_NOT_RECYCLED))

    def _should_recycle(self) -> bool:
        settings, shared = self._shared.settings, self._shared
        if settings.recycle_jobs is not None and shared.finished >= settings.recycle_jobs:
            return True
        return settings.recycle_memory is not None and resident_bytes() > settings.recycle_memory
