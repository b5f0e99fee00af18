"""The application: a program creates it, registers tasks on it and submits jobs with it.

application.py   Holdfast: tasks, submitting, reading, operating
bound_task.py    a task that knows its application, so that it can be enqueued
registration.py  tasks, middlewares and hooks of an application
submitter.py     options become jobs; lone concurrent submitters share a transaction
handle.py        a submitted job, and its result
in_process.py    a worker in the process of the application
sync.py          the blocking view of all of these
"""

from holdfast.app.application import Holdfast
from holdfast.app.bound_task import BoundTask
from holdfast.app.handle import JobHandle
from holdfast.app.registration import CallNext, Middleware

__all__ = ["BoundTask", "CallNext", "Holdfast", "JobHandle", "Middleware"]
