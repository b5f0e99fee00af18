"""Guarantees of each queue in the benchmarks, with the settings used there: read in the source of these versions."""

from __future__ import annotations

from typing import NamedTuple


class Guarantee(NamedTuple):
    """Row of the table: guarantees of a queue when it acknowledges, when a worker is killed, and after the end."""

    queue: str
    setting: str
    acknowledged: str
    killed: str
    copies: str
    result: str
    transaction: str


GUARANTEES = (
    Guarantee(
        "Holdfast",
        "5 attempts (rows `max_attempts = 1`: 1), lease 30 s",
        "after it ran",
        "runs again when its lease ends",
        "if its process is frozen or cut off past its lease; the first then cannot settle it",
        "yes, 7 days",
        "PostgreSQL, SQLite: submission, completion, steps. Redis: no",
    ),
    Guarantee(
        "PgQueuer 1.6.0",
        "batches of 500, autovacuum as it advises, heartbeat timeout 30 s",
        "after it ran, in batches: jobs that have ended wait for the next write",
        "runs again when its heartbeat is 30 s old",
        "if its process is frozen or cut off for 30 s",
        "no; a line in its log",
        "submission",
    ),
    Guarantee(
        "Procrastinate 3.10.0",
        "100 jobs at once, polls every 10 ms",
        "after it ran",
        "stays `doing`: the application looks for stalled jobs and retries them",
        "if the application retries a job whose worker is only frozen",
        "no; the job stays",
        "submission",
    ),
    Guarantee(
        "DBOS 3.4.0",
        "default executor ID, polls every 10 ms (SQLite: workflows every 100 ms)",
        "after it ran, and each step",
        "runs again from its last step, when a process of the same executor ID and version starts, or by its Conductor",
        "if a second process starts under the executor ID of one that runs",
        "yes",
        "submission by an SQL function on PostgreSQL; steps of a datasource",
    ),
    Guarantee(
        "Dramatiq 2.2.1",
        "Redis, 8 threads, 1,000 messages prefetched, no middleware (so no retries and no results)",
        "after it ran",
        "runs again when its worker's heartbeat is 60 s old and a later call happens to look (one in 1,000)",
        "if its process is frozen or cut off for 60 s",
        "no (with a middleware: yes)",
        "no",
    ),
    Guarantee(
        "TaskIQ 0.13.0, stream",
        "taskiq-redis 1.2.4, 100 jobs at once, no result backend",
        "after it ran",
        "runs again when it was unacknowledged for 10 minutes",
        "if it runs longer than 10 minutes",
        "no (with a result backend: yes)",
        "no",
    ),
    Guarantee(
        "TaskIQ 0.13.0, list",
        "taskiq-redis 1.2.4, 100 jobs at once, no result backend",
        "**before** it runs: it is taken off the list",
        "**is lost**, and so are the prefetched ones",
        "no",
        "no (with a result backend: yes)",
        "no",
    ),
    Guarantee(
        "SAQ 0.26.4",
        "100 jobs at once, `retries=5`, timeout 10 s",
        "after it ran",
        "runs again when a sweep finds it past its timeout (with its default `retries=1`: ends as aborted)",
        "if its process is frozen past its timeout",
        "yes, 10 minutes",
        "no",
    ),
    Guarantee(
        "arq 0.28.0",
        "100 jobs at once, polls every 10 ms, `keep_result=0`",
        "after it ran",
        "runs again when its mark expires: 310 s with the default timeout; 5 tries",
        "if its process is frozen past that mark",
        "no (by default: 1 hour)",
        "no",
    ),
    Guarantee(
        "Celery 5.7.0",
        "Redis, prefork with 1 process, `task_acks_late`, prefetch 64, results ignored",
        "after it ran (by default: **before**)",
        "if the whole worker is killed, runs again after an hour (visibility timeout). If its child alone is killed, "
        "fails and **does not run again** unless `task_reject_on_worker_lost` is set",
        "if it is unacknowledged for an hour",
        "no (with a result backend: yes)",
        "no",
    ),
    Guarantee(
        "streaQ 7.2.0",
        "bulk submission; drains of 100 jobs at once; idle timeout 60 s",
        "after it ran",
        "runs again when it was idle for 60 s; 3 tries",
        "if its process is frozen or cut off for 60 s",
        "yes, 5 minutes",
        "no",
    ),
    Guarantee(
        "Huey 3.5.4",
        "SQLite with `fsync`, 1 thread, polls every 10 ms",
        "**before** it runs: it is deleted from the file",
        "**is lost**",
        "no",
        "yes, unless it is `None`, as here",
        "no",
    ),
)


def guarantee_table() -> str:
    """Returns the table as Markdown."""
    heads = (
        "queue",
        "setting in the benchmarks",
        "a job is acknowledged",
        "a job that runs at a kill of its process",
        "may run twice at once",
        "its result is kept",
        "one transaction with the application's rows",
    )
    rows = [heads, ("---",) * len(heads), *GUARANTEES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
