"""Messages of Celery in its Redis broker: the lists of kombu, read and changed without Celery.

===========================================  =====================================================================
``QUEUE``, ``QUEUE<separator>PRIORITY``       a list for each queue and priority; workers take from its right end
``unacked``, ``unacked_index``                messages that workers hold, by delivery tag
``_kombu.binding.EXCHANGE``                   set of routing key, pattern and queue, joined by the separator
===========================================  =====================================================================

Every key has the prefix ``global_keyprefix``. Jobs that are aside stand in the hash ``holdfast:moving:celery``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, time, tzinfo
from decimal import Decimal
from typing import Any
from uuid import UUID

from holdfast.core.errors import Invalid
from holdfast.importing.importer import Lane, LeftJob, PeerJob, Unmovable

DEFAULT_QUEUE = "celery"
SEPARATOR = "\x06\x16"
PRIORITIES = range(10)
"""A list without a number is that of the steps that begin with 0. In Redis, Celery serves low numbers first."""
_INTERNAL = ("celeryev", "reply.celery.pidbox", "celery.pidbox")  # exchanges of Celery's own messages
EXPIRED = "it has expired: Celery's workers discard it"
_HELD = (
    "a worker holds it: it ends there; stop Celery's workers (SIGTERM gives back what has not started) and repeat; "
    "if the worker was killed and none runs, --held takes it"
)
_REWRITES = {
    "callbacks": "a job with .options(after=job.id)",
    "errbacks": 'a job with .options(after=Dependency(job.id, "failure"))',
    "chain": "app.enqueue_many(chain_jobs(…)), or await context.call(…) for results",
    "chord": "app.enqueue_batch(jobs, on_success=body.new_job())",
}
"""Fields of a message of a workflow, with what replaces the workflow."""

_TAKE_FROM_LIST = """
local taken = {}
for at = 1, #ARGV, 2 do
  local removed = redis.call('LREM', KEYS[1], -1, ARGV[at + 1])
  if removed == 1 then redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
  table.insert(taken, redis.call('HEXISTS', KEYS[2], ARGV[at]))
end
return taken
"""
_TAKE_FROM_UNACKED = """
local taken = {}
for at = 1, #ARGV, 3 do
  local removed = redis.call('HDEL', KEYS[1], ARGV[at])
  redis.call('ZREM', KEYS[3], ARGV[at])
  if removed == 1 then redis.call('HSET', KEYS[2], ARGV[at + 1], ARGV[at + 2]) end
  table.insert(taken, redis.call('HEXISTS', KEYS[2], ARGV[at + 1]))
end
return taken
"""

_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": lambda text: datetime.fromisoformat(text).date(),
    "time": time.fromisoformat,
    "decimal": Decimal,
    "uuid": lambda given: UUID(given["hex"] if isinstance(given, dict) else given),
    "bytes": str.encode,
    "base64": base64.b64decode,
}
"""The types that kombu marks in JSON."""


class CeleryBroker:
    """Implements ``Peer``."""

    name = "celery"

    def __init__(
        self,
        client: Any,
        *,
        queues: Sequence[str] = (),
        prefix: str = "",
        separator: str = SEPARATOR,
        zone: tzinfo = UTC,
        take_held: bool = False,
    ) -> None:
        """``client``: of redis-py, answering bytes. ``zone``: of instants without an offset.

        ``take_held``: also takes messages of workers; right only if no worker runs.
        """
        self._client = client
        self._queues = queues
        self._prefix = prefix
        self._separator = separator
        self._zone = zone
        self._take_held = take_held
        self._aside = f"{prefix}holdfast:moving:celery"
        self._bindings = self._read_bindings()
        """Exchange, routing key and queue."""

    # ── lists ─────────────────────────────────────────────────────────────────────────────────────────────────
    def list_queues(self) -> list[str]:
        """Returns the names of the queues that are bound to an exchange."""
        return sorted({queue for _, _, queue in self._bindings})

    def list_lanes(self) -> list[Lane]:
        """Returns the lists of every queue by priority, and the messages that workers hold."""
        queues = self._queues or self.list_queues()
        lists = [Lane("list", queue, self._list_key(queue, step)) for step in PRIORITIES for queue in queues]
        return [*lists, Lane("unacked", "", f"{self._prefix}unacked")]

    def _list_key(self, queue: str, step: int) -> str:
        return self._prefix + (f"{queue}{self._separator}{step}" if step else queue)

    def _read_bindings(self) -> list[tuple[str, str, str]]:
        begin, bindings = f"{self._prefix}_kombu.binding.", []
        for key in self._client.scan_iter(match=f"{_escape(begin)}*", count=1000):
            exchange = key.decode().removeprefix(begin)
            if exchange in _INTERNAL or self._client.type(key) != b"set":
                continue
            for member in self._client.smembers(key):
                parts = member.decode().split(self._separator)
                if len(parts) != 3:
                    remedy = "give the separator of the application's broker_transport_options: --separator"
                    raise Invalid("separator", self._separator, remedy, f"does not fit the queues in {key.decode()}")
                bindings.append((exchange, parts[0], parts[2]))
        return bindings

    def read_page(self, lane: Lane, offset: int, count: int) -> list[PeerJob | LeftJob]:
        """Returns messages of a list from its right end, or those that workers hold, the oldest first."""
        if lane.kind == "list":
            found = self._client.lrange(lane.key, -offset - count, -offset - 1)
            return [self._parse(raw, lane.queue, raw) for raw in reversed(found)]
        tags = self._client.zrange(f"{self._prefix}unacked_index", offset, offset + count - 1)
        held = self._client.hmget(lane.key, tags) if tags else []
        return [self._parse_held(tag, raw) for tag, raw in zip(tags, held, strict=True) if raw is not None]

    def read_aside(self, *, drops_expired: bool) -> list[PeerJob | LeftJob]:
        """Returns the messages that an import has taken and not dropped."""
        found = []
        for aside_id, raw in self._client.hgetall(self._aside).items():
            job = self._parse(raw, aside_id.partition(b"\0")[0].decode(), raw)
            if not (isinstance(job, LeftJob) and job.reason == EXPIRED):
                found.append(job)
            elif drops_expired:
                self._client.hdel(self._aside, aside_id)
        return found

    # ── moving ────────────────────────────────────────────────────────────────────────────────────────────────
    def take_jobs(self, lane: Lane, jobs: Sequence[PeerJob]) -> list[bool]:
        """Moves messages aside in one step each; False if a worker has taken it. True if it is aside already."""
        if lane.kind == "list":
            keys, script = [lane.key, self._aside], _TAKE_FROM_LIST
        else:
            keys, script = [lane.key, self._aside, f"{self._prefix}unacked_index"], _TAKE_FROM_UNACKED
        arguments = [part for job in jobs for part in job.source]
        return [bool(taken) for taken in self._client.eval(script, len(keys), *keys, *arguments)]

    def drop_jobs(self, jobs: Sequence[PeerJob]) -> None:
        """Removes messages from aside."""
        self._client.hdel(self._aside, *(job.source[-2] for job in jobs))

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────
    def _parse_held(self, tag: bytes, raw: bytes) -> PeerJob | LeftJob:
        try:
            message, exchange, routing_key = json.loads(raw)
            bound = [queue for *route, queue in self._bindings if route == [exchange, routing_key]]
            queue = min(bound, default=routing_key)
            found = self._parse(json.dumps(message).encode(), queue, tag)
        except (ValueError, TypeError, RecursionError):
            return LeftJob("?", "reserved", "it is no message of Celery")
        if isinstance(found, LeftJob):
            return found
        if self._take_held:
            is_named = not self._queues or queue in self._queues
            return found if is_named else LeftJob(found.task, "reserved", "its queue is not among those of --queue")
        return LeftJob(found.task, "reserved" if found.state == "waiting" else "scheduled, reserved", _HELD)

    def _parse(self, raw: bytes, queue: str, tag: bytes) -> PeerJob | LeftJob:
        task, state = "?", "waiting"
        try:
            message = json.loads(raw)
            headers, properties = message["headers"], message["properties"]
            task = str(headers.get("task", "?"))
            run_at = self._parse_instant(headers.get("eta"))
            if run_at is not None and run_at > datetime.now(UTC):
                state = "scheduled"
            args, kwargs = _read_body(message)
            expires = self._parse_instant(headers.get("expires"))
            if expires is not None and expires <= datetime.now(UTC):
                raise Unmovable(EXPIRED)
            key = f"celery:{headers['id']}:{properties['delivery_tag']}"
            aside_id = f"{queue}\0{key}".encode()
            return PeerJob(
                id=str(headers["id"]),
                task=task,
                state=state,
                key=key,
                args=args,
                kwargs=kwargs,
                queue=None if queue == DEFAULT_QUEUE else queue,
                source=(aside_id, raw) if tag is raw else (tag, aside_id, raw),
                priority=-min(int(properties.get("priority") or 0), 100),
                run_at=run_at if state == "scheduled" else None,
                expires=expires,
            )
        except Unmovable as error:
            return LeftJob(task, state, str(error))
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            return LeftJob(task, state, f"it is no message that can be read: {type(error).__name__}: {error}")

    def _parse_instant(self, text: str | None) -> datetime | None:
        if text is None:
            return None
        instant = datetime.fromisoformat(text)
        return instant if instant.tzinfo else instant.replace(tzinfo=self._zone)


def _read_body(message: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of a message; Unmovable for what Holdfast has no equivalent of."""
    headers = message["headers"]
    content = message.get("content-type")
    if content != "application/json":
        raise Unmovable(f"its body is {content}; only JSON is read: Celery's workers have to run it")
    if headers.get("compression"):
        raise Unmovable("its body is compressed: Celery's workers have to run it")
    body: Any = message["body"]
    if message["properties"].get("body_encoding") == "base64":
        body = base64.b64decode(body)
    call = json.loads(body, object_hook=_restore_type)
    if "task" not in headers:
        is_old = isinstance(call, dict) and "task" in call
        raise Unmovable(
            f"it is in task protocol 1 (task {call['task']}): Celery's workers have to run it, or set task_protocol = 2"
            if is_old
            else "it is no message of Celery"
        )
    args, kwargs, embedded = call
    for name, rewrite in _REWRITES.items():
        if embedded.get(name):
            reason = f"it belongs to a workflow of Celery ({name}): Celery's workers have to run it"
            raise Unmovable(f"{reason}; the next ones can be {rewrite}")
    return list(args), dict(kwargs)


def _restore_type(value: dict[str, Any]) -> Any:
    if value.keys() != {"__type__", "__value__"}:
        return value
    decode = _DECODERS.get(value["__type__"])
    if decode is None:
        raise Unmovable(f"it holds a value of the type {value['__type__']!r}: Celery's workers have to run it")
    return decode(value["__value__"])


def _escape(text: str) -> str:
    """Returns text as a pattern of Redis that matches only itself."""
    return "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in text)
