"""Test helpers for applications: manual time, inline jobs, assertions about enqueued jobs, fault points.

    async with testing.Harness(app) as harness:      a private store and clock, a real worker
        await send_email.enqueue("a@b.c")
        await harness.run_until_idle()                hours of retries in milliseconds
        await harness.advance(3600)

    with testing.inline(app): …                       enqueue runs the job at once and raises its error
    with testing.manual(app): …                       jobs are only stored
    with testing.inline(app, url=DATABASE): …         also for jobs in transactions of that database
    testing.assert_enqueued(app, task="email.send", args={"to": "a@b.c"})

harness.py      manual time around real workers     store_probe.py  detects when nothing can happen before time moves
inline.py       inline and manual mode              job_runner.py   runs jobs once, in these modes
transactions.py jobs in open transactions            temporary_stores.py  empty stores on the test's database
assertions.py   assertions about enqueued jobs       fixtures.py     fixtures for pytest
scenario.py     chaos scenarios, as files            chaos.py        runs them with worker processes
"""

from holdfast.core.fault_points import kill_at
from holdfast.testing.assertions import EnqueuedJobs, assert_enqueued, enqueued, refute_enqueued
from holdfast.testing.harness import Harness, NotIdle
from holdfast.testing.inline import inline, manual, run_enqueued
from holdfast.testing.temporary_stores import TemporaryStore, temporary_store

__all__ = [
    "EnqueuedJobs",
    "Harness",
    "NotIdle",
    "TemporaryStore",
    "assert_enqueued",
    "enqueued",
    "inline",
    "kill_at",
    "manual",
    "refute_enqueued",
    "run_enqueued",
    "temporary_store",
]
