"""The application as workers and their child processes import it: with Django set up."""

import django
from asgiref.sync import SyncToAsync
from django.apps import apps

if not apps.ready:
    django.setup()

from holdfast.integrations.django import app
from holdfast.worker.executors.thread import LoopThreads

__all__ = ["app"]

# A query of an async handler that hangs would keep the process of a stopped worker alive in asgiref's own thread.
SyncToAsync.single_thread_executor = LoopThreads(1)
