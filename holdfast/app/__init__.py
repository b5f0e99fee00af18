"""The application: a program creates it, registers tasks on it and submits jobs with it.

application.py   Holdfast: submits, reads, operates   registration.py  tasks, middlewares and hooks
bound_task.py    a task that can be enqueued          submitter.py     options become jobs, stored together
handle.py        a submitted job, and its result      in_process.py    a worker in the same process
batches.py       batches as they are drafted          workflows.py     steps, waits and signals of jobs
editing.py       changes of one job                   tagged_jobs.py   the jobs of a tag as a whole
limits.py        limits; backpressure.py: depths      schedules.py     schedules
alerts.py        alerts, sent by alert_sinks.py       overview.py      queues, statistics, workers, checks
faults.py        faults on purpose                    sync.py          the blocking view of all of these
"""

from holdfast.app.application import Holdfast
from holdfast.app.bound_task import BoundTask
from holdfast.app.handle import JobHandle
from holdfast.app.registration import CallNext, Middleware

__all__ = ["BoundTask", "CallNext", "Holdfast", "JobHandle", "Middleware"]
