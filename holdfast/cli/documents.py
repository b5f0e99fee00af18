"""Jobs, attempts, queues and workers as the documents of ``--json``. Field names here are part of the contract."""

from __future__ import annotations

import json
from typing import Any

from holdfast.cli.show import timestamp
from holdfast.job import Attempt, Finding, Job, JobState, Operated, Order, QueueInfo, WorkerInfo


def job_document(job: Job) -> dict[str, Any]:
    """A job with everything its row says."""
    carried = job.carried
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "state": job.state.value,
        "reason": job.reason,
        "payload": json.loads(job.payload),
        "result": None if job.result is None else json.loads(job.result),
        "error": job.error,
        "priority": job.priority,
        "attempts": job.attempts,
        "max_attempts": job.max_attempts,
        "failures": job.failures,
        "claims": job.claims,
        "losses": job.losses,
        "cancelling": job.cancelling,
        "key": job.key,
        "tags": list(carried.tags),
        "metadata": carried.metadata,
        "timeout": carried.timeout,
        "retry": carried.retry,
        "worker": job.worker,
        "created_at": timestamp(job.created_at_us),
        "run_at": timestamp(job.run_at_us),
        "started_at": timestamp(job.started_at_us),
        "lease_until": timestamp(job.lease_until_us),
        "ended_at": timestamp(job.ended_at_us),
    }


def attempt_document(attempt: Attempt) -> dict[str, Any]:
    """An attempt that did not succeed."""
    seconds = None if attempt.started_at_us is None else (attempt.ended_at_us - attempt.started_at_us) / 1e6
    return {
        "attempt": attempt.attempt,
        "claims": attempt.claims,
        "worker": attempt.worker,
        "state": attempt.state.value,
        "reason": attempt.reason,
        "error": attempt.error,
        "traceback": attempt.traceback,
        "started_at": timestamp(attempt.started_at_us),
        "ended_at": timestamp(attempt.ended_at_us),
        "seconds": seconds,
    }


def queue_document(queue: QueueInfo) -> dict[str, Any]:
    """A queue with its counts; every state is named."""
    return {
        "name": queue.name,
        "paused": queue.paused,
        "oldest_ready_seconds": None if queue.oldest_ready is None else queue.oldest_ready.total_seconds(),
        "states": {state.value: queue.states.get(state.value, 0) for state in JobState},
    }


def worker_document(worker: WorkerInfo) -> dict[str, Any]:
    """A worker process as it last said of itself."""
    pulse = worker.pulse
    return {
        "id": pulse.worker,
        "host": pulse.host,
        "pid": pulse.pid,
        "state": worker_state(worker),
        "queues": pulse.queues,
        "concurrency": pulse.concurrency,
        "running": pulse.running,
        "succeeded": pulse.succeeded,
        "failed": pulse.failed,
        "started_at": timestamp(worker.started_at_us),
        "seen_at": timestamp(worker.seen_at_us),
    }


def worker_state(worker: WorkerInfo) -> str:
    """``working``, ``stopping`` or ``draining`` by order, or ``lost``: silent for longer than its lease."""
    if not worker.alive:
        return "lost"
    return {Order.STOP: "stopping", Order.DRAIN: "draining"}.get(worker.order, "working")


def operated_document(operated: Operated) -> dict[str, Any]:
    """What an operation did."""
    return {
        "changed": [{"id": job_id, "state": state.value} for job_id, state in operated.changed],
        "refused": [{"id": job_id, "state": state.value if state else None} for job_id, state in operated.refused],
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    """One line of ``doctor``."""
    return {"name": finding.name, "level": finding.level, "text": finding.text, "remedy": finding.remedy or None}
