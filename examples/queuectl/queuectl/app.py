"""The application. It registers no task: command jobs are Holdfast's own, and its settings allow them."""

from __future__ import annotations

from holdfast import Holdfast
from queuectl.config import Place


def open_app(place: Place) -> Holdfast:
    """The application on the database and the settings of a place."""
    return Holdfast(settings=place.settings())


app = open_app(Place.here())
"""The one in the working directory, for Holdfast's own commands: ``holdfast show key:job1 --app queuectl.app:app``."""
