"""Tasks of the application that moves, for Celery, RQ and Holdfast alike."""

from __future__ import annotations

from datetime import datetime

from holdfast import Holdfast

app = Holdfast()


def note(number: int, text: str = "") -> None:
    """A task of every queue."""


def remind(at: datetime) -> None:
    """A task with an argument that JSON does not have."""


def remind_once(number: int) -> None:
    """A task of which one job waits at a time."""


app.task("note")(note)
app.task("once", unique="1d")(remind_once)
app.task("remind")(remind)
