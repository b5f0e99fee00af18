"""A store with one of everything, for pages and actions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.lifecycle import Failed
from holdfast.core.models import Job
from holdfast.core.steps import PROGRESS, STATE, NewStep
from holdfast.core.workers import WorkerHeartbeat
from tests.web.client import Api

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}\u202e\u0007javascript:alert(3)"
"""Text that must never be more than text."""
_SIZE: dict[str, Any] = {"version": "2.4.1", "memory": 90 << 20}
_INVISIBLE = str.maketrans("", "", "\u202e\u0007")


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Ids and names of what there is."""

    queued: str
    dead: str
    running: str
    error: str
    batch: str
    worker: str = "worker-1"


def make_world(api: Api, text: str = "plain") -> World:
    """Fills an empty store; every field that may hold any text holds this one."""
    key = f"key {text}".translate(_INVISIBLE)  # keys and tags hold no such characters
    queued = api.submit(queue="mail", payload={"to": text, text: 1}, key=key, metadata={text: text})
    error = Failed(error=text, traceback=f"Traceback\n{text}", retryable=False)
    dead = api.submit(queue="mail", payload={"list": [text]}, tags=["red", key[:90]])["id"]
    api.run(api.end(dead, error))
    running = api.submit(queue="mail", payload={})["id"]
    api.submit(queue="later", after=[running])
    api.run(_at_work(api, running, text))
    member = {"task": "work", "payload": {}, "queue": "bulk"}
    body = {"jobs": [member, member, member], "on_success": [member], "tags": ["spring"]}
    batch = api.post("/v1/batches", body, 201)
    api.succeed(batch["jobs"][0])
    api.post(f"/v1/jobs/{batch['jobs'][1]}/cancel", {})
    schedule = {"name": "nightly", "task": "report", "queue": "mail", "payload": {"text": text}, "cron": "0 3 * * *"}
    api.post("/v1/schedules", schedule | {"zone": "Europe/Zurich"}, 201)
    api.post("/v1/limits", {"name": "crm", "queue": "crm", "concurrency": 5, "rate": "1000/s"}, 201)
    api.post("/v1/limits", {"name": "keyed", "queue": "crm", "by": "args.to", "concurrency": 2}, 201)
    group = api.get(f"/v1/jobs/{dead}")["error_group"]
    return World(queued=queued["id"], dead=dead, running=running, error=group, batch=batch["id"])


async def _at_work(api: Api, job_id: str, text: str) -> None:
    job: Job = await api.claim(job_id)
    store = await api.app.open_store()
    fields = msgspec.json.encode({text: text}).decode()
    line = NewLine(1, timedelta(0), "info", text, fields)
    await store.queueing.append_logs([LogBatch(job.lease, [line])])
    result = msgspec.json.encode(text).decode()
    progress = msgspec.json.encode({"done": 3, "total": 10, "message": text}).decode()
    steps = [
        NewStep(job.lease, text.replace("#", ""), 1, True, result),
        NewStep(job.lease, PROGRESS, 0, False, progress),
        NewStep(job.lease, STATE, 0, False, result),
    ]
    assert await store.workflow.save_steps(steps) == [True] * 3
    heartbeat = WorkerHeartbeat(
        worker="worker-1", host=text[:200], pid=7, queues="*", concurrency=3, running=1, **_SIZE
    )
    await store.queueing.heartbeat(heartbeat, [], lease_for=timedelta(minutes=10))
