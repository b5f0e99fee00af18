"""The application: command jobs, which are Holdfast's own and allowed by the settings, and what you register."""

from __future__ import annotations

from holdfast import Holdfast
from queuectl.config import Place


def register(app: Holdfast) -> None:
    """Put your own tasks, middlewares and subscriptions to events here; workers, commands and dashboard have them."""


def open_app(place: Place) -> Holdfast:
    """The application on the database and the settings of a place."""
    app = Holdfast(settings=place.settings())
    register(app)
    return app


app = open_app(Place.here())
"""The one in the working directory, for Holdfast's own commands: ``holdfast show key:job1 --app queuectl.app:app``."""
