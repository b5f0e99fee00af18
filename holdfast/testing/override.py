"""Lending an application a store of its own for a while."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.app import Holdfast
from holdfast.app.submitter import Submitter
from holdfast.core.portal import drive_coroutine

_MARK = "_is_lent"


def is_lent(app: Holdfast) -> bool:
    """Returns True if the application is under test: on a store of its own."""
    return _MARK in vars(app)


@contextmanager
def override_store(app: Holdfast, changed: Mapping[str, Any], **others: Any) -> Iterator[None]:
    """Inside, ``app`` has a private store, settings ``changed`` as said, and these other attributes.

    Afterwards it is as it was before, and that store is gone: a file of its own, unless ``changed`` has a ``url``.
    """
    before = dict(vars(app))
    stores = {view: vars(view)["_store"] for view in app.views}
    for view in stores:
        vars(view)["_store"] = None
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder:
        own = {"url": f"sqlite:///{Path(folder) / 'jobs.db'}", "transport": "none"}
        settings = app.settings.replace_values(**({} if "url" in changed else own), **changed)
        submitter = Submitter(app.open_store, lambda: settings, app.events, app.spans)
        vars(app).update({"settings": settings, "_store": None, "_submitter": submitter, _MARK: True, **others})
        try:
            yield
        finally:
            for each in (app, *app.views):
                drive_coroutine(_close(each))
                vars(each)["_store"] = stores.get(each)
            vars(app).clear()
            vars(app).update(before)


async def _close(app: Holdfast) -> None:
    store = vars(app)["_store"]
    if store is not None:
        await store.close()
