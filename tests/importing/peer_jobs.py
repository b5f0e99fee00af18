"""Tasks of the application that moves, for Celery, RQ and Holdfast alike."""

from __future__ import annotations

from datetime import datetime

from holdfast import Holdfast

app = Holdfast()


def note(number: int, text: str = "") -> None:
    """A task of every queue."""


def remind(at: datetime) -> None:
    """A task with an argument that JSON does not have."""


app.task("note")(note)
app.task("remind")(remind)
