"""Jobs of RQ in its Redis, read and changed without RQ.

=============================  ==============================================================================
``rq:queues``                  set of the keys of all queues
``rq:queue:QUEUE``             list of ids; workers take from its left end
``rq:scheduled:QUEUE``         sorted set of ids by the second at which they are due
``rq:job:ID``                  hash of a job; ``data`` is its call: pickle or JSON, compressed
=============================  ==============================================================================

``rq:scheduler:scheduled_jobs`` is a sorted set of the package rq-scheduler, which keeps the ids of repeated jobs.
``rq`` is the prefix (RQ_KEY_PREFIX). Jobs that are aside stand in the hash ``rq:holdfast:moving``, and each one's own
hash in ``rq:holdfast:moving:ID CREATED_AT``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast.importing.importer import Lane, LeftJob, PeerJob, Unmovable
from holdfast.importing.plain_pickle import NotPlain, read_plain_pickle

DEFAULT_QUEUE = "default"
MAX_CLOCK_DIFFERENCE = 10
"""Seconds by which a scheduler's clock may be ahead of the server's: it reads due jobs before it removes them."""
EXPIRED = "its ttl is over: RQ drops it"
_LANES = {
    "queued": "queue:{}",
    "scheduled": "scheduled:{}",
    "started": "wip:{}",
    "intermediate": "queue:{}:intermediate",
    "deferred": "deferred:{}",
    "failed": "failed:{}",
}
_RQ_SCHEDULER = "rq:scheduler:scheduled_jobs"
_LISTS = frozenset({"queued", "intermediate"})
_STAYING = {
    "started": "a worker runs it: it ends there",
    "intermediate": "a worker takes it: it ends there; if no worker of RQ runs, --held takes it",
    "rq-scheduler": "rq-scheduler puts it into its queue; declare a schedule here, or import it when it is there",
    "deferred": "it waits for another job of RQ: import it when that has ended",
    "failed": "it has failed there; --failed takes it, too, and runs it here",
}
_DUE = "it is due: RQ's scheduler puts it into its queue now"
_MAX_SIZE = 64 * 1024 * 1024  # of a job's call, decompressed
_FIELDS = {
    "success_callback_name": "a callback",
    "failure_callback_name": "a callback",
    "stopped_callback_name": "a callback",
    "webhooks": "a webhook",
    "repeats_left": "repetitions: declare a schedule here",
    "rate_limit_key": "a rate limit: declare a limit here",
}
"""Fields of a job's hash that Holdfast has no equivalent of, with what they are."""

_TAKE = """
local aside, prefix, kind, queue, now = KEYS[2], ARGV[1], ARGV[2], ARGV[3], redis.call('TIME')
local is_scheduled = kind == 'scheduled' and redis.call('EXISTS', KEYS[3]) == 1
local taken = {}
for at = 4, #ARGV, 2 do
  local id, removed, due = ARGV[at], 0, false
  local job = prefix .. ':job:' .. id
  local created = redis.call('HGET', job, 'created_at')
  local is_repeated = redis.call('ZSCORE', KEYS[4], id)
  if created and not is_repeated and redis.call('EXISTS', job .. ':dependents') == 0 then
    if kind == 'queued' or kind == 'intermediate' then
      removed = redis.call('LREM', KEYS[1], 1, id)
    else
      due = redis.call('ZSCORE', KEYS[1], id)
      if due and not (is_scheduled and tonumber(due) <= tonumber(now[1]) + MAX_CLOCK_DIFFERENCE) then
        removed = redis.call('ZREM', KEYS[1], id)
      end
    end
  end
  if removed == 1 then
    local left, aside_id, expires = redis.call('PTTL', job), id .. ' ' .. created, 0
    if left > 0 and redis.call('HEXISTS', job, 'ttl') == 1 then expires = tonumber(now[1]) + left / 1000 end
    redis.call('RENAME', job, aside .. ':' .. aside_id)
    redis.call('PERSIST', aside .. ':' .. aside_id)
    redis.call('HSET', aside, aside_id, cjson.encode({queue, kind, due and tonumber(due) or 0, expires}))
  end
  table.insert(taken, redis.call('HEXISTS', aside, ARGV[at + 1]))
end
return taken
""".replace("MAX_CLOCK_DIFFERENCE", str(MAX_CLOCK_DIFFERENCE))


class RQQueues:
    """Implements ``Peer``."""

    name = "rq"

    def __init__(
        self,
        client: Any,
        *,
        queues: Sequence[str] = (),
        prefix: str = "rq",
        take_failed: bool = False,
        take_held: bool = False,
    ) -> None:
        """``client``: of redis-py, answering bytes. ``take_failed``: also takes jobs that have failed.

        ``take_held``: also takes jobs that a worker has fetched and not started; right only if no worker runs.
        """
        self._client = client
        self._queues = queues
        self._prefix = prefix
        self._taken = {"failed": take_failed, "intermediate": take_held}
        self._aside = f"{prefix}:holdfast:moving"

    def list_queues(self) -> list[str]:
        """Returns the names of the queues that have had a job."""
        begin = f"{self._prefix}:queue:"
        return sorted(key.decode().removeprefix(begin) for key in self._client.smembers(f"{self._prefix}:queues"))

    def list_lanes(self) -> list[Lane]:
        """Returns the queue and the registries of every queue."""
        queues = self._queues or self.list_queues()
        lanes = [
            Lane(kind, queue, f"{self._prefix}:{key.format(queue)}") for kind, key in _LANES.items() for queue in queues
        ]
        return lanes if self._queues else [*lanes, Lane("rq-scheduler", "", _RQ_SCHEDULER)]

    def read_page(self, lane: Lane, offset: int, count: int) -> list[PeerJob | LeftJob]:
        """Returns jobs of a queue or registry, the next one first."""
        last = offset + count - 1
        if lane.kind in _LISTS:
            entries = [(entry, 0.0) for entry in self._client.lrange(lane.key, offset, last)]
        else:
            entries = self._client.zrange(lane.key, offset, last, withscores=True)
        found = [(entry.decode(), due) for entry, due in entries]
        if lane.kind == "started":
            found = [(entry.partition(":")[0], due) for entry, due in found]  # job and execution
        with self._client.pipeline(transaction=False) as pipeline:
            for job_id, _ in found:
                pipeline.hgetall(f"{self._prefix}:job:{job_id}")
                pipeline.pttl(f"{self._prefix}:job:{job_id}")
                pipeline.exists(f"{self._prefix}:job:{job_id}:dependents")
                pipeline.zscore(_RQ_SCHEDULER, job_id)
            pipeline.exists(f"{self._prefix}:scheduler-lock:{lane.queue}")
            *answers, has_scheduler = pipeline.execute()
        now, page = datetime.now(UTC), []
        for number, (job_id, due) in enumerate(found):
            fields, left, has_dependents, repeated_at = answers[4 * number : 4 * number + 4]
            expires = now + timedelta(milliseconds=left) if left > 0 and b"ttl" in fields else None
            job = self._parse(job_id, fields, lane.kind, lane.queue, due, expires)
            if isinstance(job, PeerJob) and lane.kind == "queued" and repeated_at is not None:
                job = LeftJob(job.task, job.state, _STAYING["rq-scheduler"])
            elif isinstance(job, PeerJob):
                job = self._leave(job, lane, now, bool(has_scheduler), bool(has_dependents))
            page.append(job)
        return page

    def _leave(
        self, job: PeerJob, lane: Lane, now: datetime, has_scheduler: bool, has_dependents: bool
    ) -> PeerJob | LeftJob:
        """Returns the job, or the reason why it stays."""
        is_due = lane.kind == "scheduled" and (
            job.run_at is None or job.run_at <= now + timedelta(seconds=MAX_CLOCK_DIFFERENCE)
        )
        if lane.kind in _STAYING and not self._taken.get(lane.kind):
            return LeftJob(job.task, job.state, _STAYING[lane.kind])
        if has_dependents:
            return LeftJob(job.task, job.state, "other jobs of RQ wait for it: RQ's workers have to run it")
        if is_due and has_scheduler:
            return LeftJob(job.task, job.state, _DUE)
        return job

    def read_aside(self, *, drops_expired: bool) -> list[PeerJob | LeftJob]:
        """Returns the jobs that an import has taken and not dropped."""
        found = []
        for aside_id, text in self._client.hgetall(self._aside).items():
            queue, kind, due, expires = json.loads(text)
            fields = self._client.hgetall(f"{self._aside}:{aside_id.decode()}")
            until = datetime.fromtimestamp(expires, UTC) if expires else None
            job = self._parse(aside_id.decode().rpartition(" ")[0], fields, kind, queue, due, until)
            if fields and not (isinstance(job, LeftJob) and job.reason == EXPIRED):
                found.append(job)
            elif drops_expired:
                self._drop([aside_id.decode()])
        return found

    # ── moving ────────────────────────────────────────────────────────────────────────────────────────────────
    def take_jobs(self, lane: Lane, jobs: Sequence[PeerJob]) -> list[bool]:
        """Moves jobs aside in one step each; False if a worker or the scheduler has it. True if it is aside already."""
        keys = [lane.key, self._aside, f"{self._prefix}:scheduler-lock:{lane.queue}", _RQ_SCHEDULER]
        ids = [part for job in jobs for part in (job.id, job.source)]
        taken = self._client.eval(_TAKE, len(keys), *keys, self._prefix, lane.kind, lane.queue, *ids)
        return [bool(each) for each in taken]

    def drop_jobs(self, jobs: Sequence[PeerJob]) -> None:
        """Removes jobs from aside."""
        self._drop([str(job.source) for job in jobs])

    def _drop(self, aside_ids: Sequence[str]) -> None:
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.hdel(self._aside, *aside_ids)
            pipeline.unlink(*(f"{self._aside}:{aside_id}" for aside_id in aside_ids))
            pipeline.execute()

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _parse(
        self, job_id: str, fields: Mapping[bytes, bytes], kind: str, queue: str, due: float, expires: datetime | None
    ) -> PeerJob | LeftJob:
        task, state = "?", "started" if kind == "intermediate" else kind
        try:
            if b"data" not in fields:
                raise Unmovable("its data are gone: RQ skips it")
            task, args, kwargs = _read_call(fields[b"data"])
            for name, meaning in _FIELDS.items():
                if fields.get(name.encode(), b"") not in (b"", b"0"):
                    raise Unmovable(f"it has {meaning}; RQ's workers have to run it")
            if expires is not None and expires <= datetime.now(UTC):
                raise Unmovable(EXPIRED)
            run_at = datetime.fromtimestamp(due, UTC) if kind == "scheduled" else None
            created, meta = fields[b"created_at"].decode(), fields.get(b"meta")
            return PeerJob(
                id=job_id,
                task=task,
                state=state,
                key=f"rq:{job_id}:{created}",
                args=args,
                kwargs=kwargs,
                queue=None if queue == DEFAULT_QUEUE else queue,
                source=f"{job_id} {created}",
                run_at=run_at if run_at is not None and run_at > datetime.now(UTC) else None,
                expires=expires,
                meta=_read_value(meta) if meta else None,
            )
        except NotPlain as error:
            return LeftJob(task, state, f"{error}; RQ's workers have to run it, or enqueue it anew with plain values")
        except Unmovable as error:
            return LeftJob(task, state, str(error))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            return LeftJob(task, state, f"it is no job that can be read: {type(error).__name__}: {error}")


def _read_value(data: bytes) -> Any:
    return read_plain_pickle(data, _MAX_SIZE) if data[:1] == b"\x80" else json.loads(data)


def _read_call(data: bytes) -> tuple[str, list[Any], dict[str, Any]]:
    """Returns the function's name and the arguments; nothing of the pickle is executed."""
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(data, _MAX_SIZE)
    except zlib.error:  # older versions of RQ did not compress
        pass
    else:
        if reader.unconsumed_tail:
            raise Unmovable(f"its data have more than {_MAX_SIZE:,} bytes")
    name, instance, args, kwargs = _read_value(data)
    if instance is not None:
        raise Unmovable(f"it calls a method of an object: {name}; RQ's workers have to run it")
    return str(name), list(args), dict(kwargs)
