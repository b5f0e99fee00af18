"""Test helpers for applications: manual time, inline jobs, assertions about enqueued jobs, fault points.

    async with testing.Harness(app) as harness:      a private store and clock, a real worker
        await send_email.enqueue("a@b.c")
        await harness.run_until_idle()                hours of retries in milliseconds
        await harness.advance(3600)

    with testing.inline(app): …                       enqueue runs the job at once and raises its error
    with testing.manual(app): …                       jobs are only stored
    testing.assert_enqueued(app, task="email.send", args={"to": "a@b.c"})

harness.py      manual time around real workers     store_probe.py  detects when nothing can happen before time moves
inline.py       inline and manual mode, on a private store
assertions.py   assertions about enqueued jobs       fixtures.py     fixtures for pytest
scenario.py     chaos scenarios, as files            chaos.py        runs them with worker processes
"""

from holdfast.core.fault_points import kill_at
from holdfast.testing.assertions import assert_enqueued, enqueued, refute_enqueued
from holdfast.testing.harness import Harness, NotIdle
from holdfast.testing.inline import inline, manual

__all__ = ["Harness", "NotIdle", "assert_enqueued", "enqueued", "inline", "kill_at", "manual", "refute_enqueued"]
