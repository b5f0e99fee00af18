"""An application whose calls of the store have a deadline, beside users of the same application without one."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from holdfast.app.application import Holdfast
from holdfast.app.submitter import Submitter
from holdfast.stores import ExternalTransactions
from holdfast.stores.base import Store


class WithDeadline(Holdfast):
    """A view of an application, with a store of its own whose calls take at most ``patience`` seconds.

    Everything else is the application's: settings, tasks, events, clocks, and methods that its class overrides.
    Closing the application closes this store.
    """

    def __new__(cls, app: Holdfast, patience: float) -> WithDeadline:
        """Derives from the class of the application too, so that methods which that class overrides are called."""
        own = type(app)
        return super().__new__(cls if issubclass(cls, own) else type(cls.__name__, (cls, own), {}))

    def __init__(self, app: Holdfast, patience: float) -> None:
        self._app = app
        self.patience = patience
        self.views = weakref.WeakSet()
        self._store = None
        self._making = threading.Lock()
        self._users = 0
        self._own_submitter = Submitter(self.open_store, lambda: self.settings, app.events, app.spans)
        self.within = ExternalTransactions(self.open_store, self._reached)
        app.views.add(self)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the application that this view does not set itself."""
        return getattr(self._app, name)

    @property
    def _submitter(self) -> Submitter:  # type: ignore[override]
        """Its own, unless tests have replaced the application's."""
        shared = self._app._submitter
        return self._own_submitter if type(shared) is Submitter else shared

    def new_store(self, patience: float | None = None) -> Store:
        """Another, unopened, store on the same jobs, with this deadline."""
        return self._app.new_store(self.patience if patience is None else patience)
