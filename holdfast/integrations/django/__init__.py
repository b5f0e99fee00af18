"""Holdfast in a Django project: `pip install 'holdfast[django]'`.

INSTALLED_APPS = [..., "holdfast.integrations.django"]

from holdfast.integrations.django import task

@task()
def confirm(number: int) -> None: ...

confirm.sync.enqueue(order.id)  # part of atomic(); in async code: await confirm.enqueue(order.id)

application.py  the application: its settings, and jobs in the transactions of its callers
database.py     the URL of a database of DATABASES, and connections around handlers
apps.py         schema and discovery of tasks
worker.py       the application as `holdfast worker start` and child processes import it
backend.py      the backend for ``django.tasks``
admin.py        jobs in the admin; its model is in models.py
"""

from typing import TYPE_CHECKING

try:
    import django  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("holdfast.integrations.django needs Django; pip install 'holdfast[django]'") from error

from holdfast.app.registration import PEER_NAMES
from holdfast.integrations.django.application import DjangoHoldfast

__all__ = ["app", "task"]

app = DjangoHoldfast()
"""The application of this project: its settings are ``HOLDFAST``."""

task = app.task
"""Decorator of a task of this project, as ``app.task``."""

if not TYPE_CHECKING:  # to a type checker, other names are errors as ever

    def __getattr__(name: str) -> object:
        """Explains a decorator that Celery and Huey have."""
        if name in ("shared_task", "db_task", "periodic_task", "db_periodic_task"):
            raise ImportError(f"cannot import name {name!r} from {__name__!r}; {PEER_NAMES[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
