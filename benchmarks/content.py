"""Content of a system that has run for days: jobs in every state and queue, dead ones with 300 different errors,
workers, schedules, limits, and counts of ended jobs. One statement for each table, in the dialect of each SQL store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from benchmarks.application import Application
from holdfast.core.ids import new_id
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.models import Job, JobState, NewJob, Reason, Settlement
from holdfast.core.workers import WorkerHeartbeat
from holdfast.stores.base import ClaimRequest, Store

QUEUES, TASKS, ERRORS, WORKERS, SCHEDULES, LIMITS = 200, 40, 300, 30, 50, 20
_STORY_ATTEMPTS, _STORY_LINES = 20, 2000  # of one job
_AGE_US = 3 * 86_400_000_000
_HOUR_US = 3_600_000_000

_STATE = """case when n % 100 = 7 then 6 when n % 100 = 9 then 7 when n % 200 = 150 then 3
    when n <= {jobs} / 100 then 1 when n > {jobs} - {jobs} / 50 then 0 when n % 1000 = 500 then 2 else 5 end"""
"""State of each job by its number: 1 % each dead, cancelled and scheduled, 2 % queued, 0.5 % failed, 0.1 % running."""
_JOBS = """
insert into {job} (id, queue, task, payload, state, rank, run_at, created_at, max_attempts, claims, attempts, worker,
    lease_until, started_at, ended_at, reason, error, error_group, result{more})
select {id}, 'queue-' || (cast(n as bigint) * 7919 / 1000 % {queues}), 'task-' || (n / 3 % {tasks}),
    '{{"customer":' || n || ',"lines":[1,2,3]}}', state, 0,
    case when state in (1, 3) then {now} + {hour} + n else at end, at, 5, begun, begun,
    case when begun > 0 then 'worker-' || (n % {workers}) end, case state when 2 then {now} + {hour} end,
    case when begun > 0 then at + 1000000 end, case when state > 4 then at + 1500000 end,
    case state when 6 then 'max_attempts' when 7 then 'cancelled' when 3 then 'error' end,
    case when state in (3, 6) then
        'ConnectionError: host db-' || (n / 100 % {errors}) || ' did not answer request ' || n || ' within 30 s' end,
    case when state in (3, 6) then {group} end, case state when 5 then '{{"sent":true}}' end{more_values}
from (select n, at, state, case when state < 2 then 0 when state = 6 then 3 else 1 end as begun
    from (select n, {now} - ({jobs} - n) * ({age} / {jobs}) as at, {state} as state
        from ({numbers}) numbers) jobs) begun
"""
_ATTEMPTS = """
insert into {attempt} ({of_job}, claims, attempt, worker, started_at, ended_at, state, reason, error, traceback)
select j.{key}, a.n, a.n, j.worker, j.started_at + a.n, j.started_at + a.n + 400000,
    case when a.n < j.claims then 3 else j.state end, 'error', j.error,
    'Traceback (most recent call last):' || line.ending || '  File "/app/tasks.py", line 12, in ' || j.task
        || line.ending || '    answer = await client.get(address, timeout=30)' || line.ending
        || '  File "/app/client.py", line 88, in get' || line.ending || '    raise ConnectionError(host)' || line.ending
        || j.error
from {job} j cross join (select {newline} as ending) line
    cross join (select n from ({numbers}) numbers where n <= 3) a
where j.state in (3, 6) and a.n <= j.claims
"""
_TAGS = """
insert into {tag} (tag, {of_tagged}) select 'customer-' || (j.seq % {errors}), j.{key} from {job} j where j.seq % 50 = 0
"""
_KEYS = "insert into {key_table} (key, job_id) select 'order-' || j.seq, j.id from {job} j where j.seq % 20 = 0"
_HISTORY = """
insert into {history} (length, start, queue, state, number, run_us, longest_us)
select span.length, {now} - {now} % span.length - place.n * span.length, 'queue-' || queue.n, state.code,
    case state.code when 5 then 40 else 1 end, 4000000, 900000
from (select 60000000 as length, 360 as intervals union all select {hour}, 744) span
cross join (select n from ({numbers}) numbers where n <= 744) place
cross join (select n - 1 as n from ({numbers}) numbers where n <= {queues}) queue
cross join (select 5 as code union all select 6) state
where place.n <= span.intervals and (state.code = 5 or queue.n % 10 = 0)
"""


def write_rows(execute: Callable[[str], object], words: Mapping[str, str], jobs: int) -> None:
    """Writes jobs with what belongs to them. ``words``: names and expressions of a dialect."""
    given: dict[str, Any] = {"now": time.time_ns() // 1000, "jobs": jobs, "age": _AGE_US, "hour": _HOUR_US}
    given |= {"queues": QUEUES, "tasks": TASKS, "errors": ERRORS, "workers": WORKERS, "state": _STATE.format(jobs=jobs)}
    for template in (_JOBS, _ATTEMPTS, _TAGS, _KEYS, _HISTORY):
        numbers = words["numbers"].format(jobs=jobs if template is _JOBS else 744)
        execute(template.format(**{**words, **given, "numbers": numbers}))


async def add_rest(url: str) -> str:
    """Adds workers, schedules, limits, and a dead job of many attempts and log lines; returns the id of that job."""
    async with Application(url) as app:
        store = await app.open_store()
        for number in range(WORKERS):
            queues = "*" if number == 0 else f"queue-{number}"
            heartbeat = WorkerHeartbeat(
                worker=f"worker-{number}",
                host=f"host-{number % 5}",
                pid=number,
                queues=queues,
                concurrency=50,
                running=30,
            )
            await store.queueing.heartbeat(heartbeat, [], lease_for=timedelta(hours=1))
        for number in range(SCHEDULES):
            job = app.noop.options(queue=f"queue-{number}").new_job(n=number)
            await app.schedules.add(f"schedule-{number}", job, cron=f"{number} 3 * * *", zone="Europe/Zurich")
        for number in range(LIMITS):
            await app.limits.add(f"limit-{number}", queue=f"limited-{number}", concurrency=5, rate="100/s")
        return await _add_story(store)


async def _add_story(store: Store) -> str:
    """Adds a job with many attempts and log lines; returns its id."""
    job = NewJob(id=new_id(), task="story", queue="story", key="story", payload='{"customer":7}', max_attempts=None)
    await store.queueing.submit([job])
    for attempt in range(1, _STORY_ATTEMPTS + 1):
        request = ClaimRequest("worker-1", {"story": 1}, limit=1, lease_for=timedelta(minutes=5))
        [claimed] = (await store.queueing.claim(request)).jobs
        numbers = range(1, _STORY_LINES // _STORY_ATTEMPTS + 1)
        lines = [NewLine(number, timedelta(0), "info", f"fetched page {number}") for number in numbers]
        await store.queueing.append_logs([LogBatch(claimed.lease, lines)])
        await store.queueing.settle([fail_job(claimed, attempt, is_last=attempt == _STORY_ATTEMPTS)])
    return job.id


def fail_job(job: Job, number: int, *, is_last: bool = True) -> Settlement:
    """Returns the settlement of a failed attempt, with one of many errors."""
    host = "".join(chr(ord("a") + int(digit)) for digit in str(number % ERRORS))  # numbers make no group of their own
    error = f"ConnectionError: host {host} did not answer request {number} within 30 s"
    text = f'Traceback (most recent call last):\n  File "/app/client.py", line 88, in get\n{error}'
    return Settlement(
        job_id=job.id,
        claims=job.claims,
        state=JobState.DEAD if is_last else JobState.FAILED,
        reason=Reason.ERROR,
        error=error,
        traceback=text,
        delay=None if is_last else timedelta(0),
    )
