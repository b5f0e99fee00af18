"""An application whose calls of the store have a deadline, beside others that use the same application without one."""

from __future__ import annotations

import threading
from typing import Any

from holdfast.app.application import Holdfast
from holdfast.app.submitter import Submitter
from holdfast.store import Store
from holdfast.stores import Within


class WithDeadline(Holdfast):
    """A view of an application, with a store of its own whose calls take at most ``patience`` seconds.

    Everything else is the application's: settings, tasks, events, clocks. Closing the application closes this store.
    """

    def __init__(self, app: Holdfast, patience: float) -> None:
        self._app = app
        self.patience = patience
        self._store = None
        self._making = threading.Lock()
        self._users = 0
        self._own_submitter = Submitter(self.opened, lambda: self.settings, app.events, app.spans)
        self.within = Within(self.opened, self._reached)
        app.views.add(self)

    def __getattr__(self, name: str) -> Any:
        """Whatever is not set here."""
        return getattr(self._app, name)

    @property
    def _submitter(self) -> Submitter:  # type: ignore[override]
        """Its own, unless tests have replaced the application's."""
        shared = self._app._submitter
        return self._own_submitter if type(shared) is Submitter else shared

    def new_store(self, patience: float | None = None) -> Store:
        """Another, unopened, store on the same jobs, with this deadline."""
        return self._app.new_store(self.patience if patience is None else patience)
