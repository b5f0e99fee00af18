"""Connections to Redis that run the store's scripts, and the URL that names a namespace."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from redis import exceptions as driver

from holdfast.core.errors import ConfigError, Unavailable
from holdfast.stores.common.unconfirmed import perhaps_done
from holdfast.stores.connections import redis
from holdfast.stores.connections.redis import Script, WriteNotConfirmed
from holdfast.stores.connections.redis_protocol import Argument, RedisConnection
from holdfast.stores.connections.redis_url import Server, parse_server
from holdfast.stores.redis.snapshot import OWN_NAMES

_MARK = "redis.call('DEL', KEYS[1]) redis.call('SET', KEYS[1], '') redis.call('DEL', KEYS[1])"
"""A write that leaves nothing, even where memory is full. PUBLISH would not do: a cluster does not replicate it."""
_CONFIRMED = 5.0  # seconds a write waits for the disk and the replicas that were declared
_SEARCH = 0.65  # of the call deadline: for a search of jobs, and for the confirmation by disk and replicas


class NamespacePool(redis.RedisPool):
    """The connections of one event loop to one namespace."""

    def __init__(
        self,
        address: RedisAddress,
        *,
        now: Callable[[], int] | None,
        lost: Script | None = None,
        call_deadline: float | None = None,
    ) -> None:
        """``lost``: script that detects lost writes. ``call_deadline``: maximum seconds of a call."""
        super().__init__(address.server, address.prefix, deadline=call_deadline)
        self.address = address
        self.is_confirmed = (
            address.durability == "waitaof" or address.replicas > 0
        )  # writes, before they are acknowledged
        self.search_for = None if call_deadline is None else _SEARCH * call_deadline
        """Seconds a filter may look for jobs; None: as long as it takes."""
        self._confirmed = _CONFIRMED if call_deadline is None else _SEARCH * call_deadline
        self.name = uuid4().hex[:12]  # sender of notifications: the pool ignores its own
        self._now = now
        self._lost = lost
        self._latest: tuple[int, str] | None = None  # number of submission and id of the last job stored for us

    def note_stored(self, entry: bytes, job_id: str) -> int:
        """Notes that the server has acknowledged this job; answers on several connections come in any order.

        ``entry``: the last answer of a script that stored it. Returns the instant in microseconds.
        """
        number, instant_us = map(int, entry.split())
        if self._latest is None or number > self._latest[0]:
            self._latest = number, job_id
        return instant_us

    async def _prepare(self, connection: RedisConnection) -> bool:
        """Detects acknowledged writes that a restart or failover lost, before the next write, for the doctor."""
        if self._latest is None or self._lost is None:
            return True
        known = self._latest
        try:
            lost, is_known = await connection.send_command(
                "EVAL", self._lost.text, 5, *self.address.keys, self._instant, self.name, *known
            )
        except driver.ResponseError:
            return False  # it takes no writes now: the call itself says so, and the next one asks again
        if not is_known and self._latest == known:
            self._latest = None
        if lost:
            text = "%s came back without %d or more of the jobs that it had acknowledged"
            logging.getLogger(__name__).error(text, self.place, lost)
        return True

    @property
    def _instant(self) -> Argument:
        """For scripts: the store's instant; "" for the server's own."""
        return "" if self._now is None else self._now()

    async def run(
        self,
        script: Script,
        *arguments: Argument,
        on_uncertain: Callable[[], object] | None = None,
        extra_time: float = 0.0,
        must_confirm: bool = False,
    ) -> Any:
        """Returns the answer of the script; with ``must_confirm`` once disk and replicas have the write, as declared.

        ``on_uncertain``, ``extra_time``: see ``call``.
        """
        (reply,) = await self.run_each(
            script, [arguments], on_uncertain=on_uncertain, extra_time=extra_time, must_confirm=must_confirm
        )
        return reply

    async def run_keyed(self, script: Script, *arguments: Argument) -> Any:
        """Returns the answer of a script with the fragment ``answers``: sent again, it does nothing twice. Unavailable
        says whether it may have been done."""
        uncertain: list[bool] = []
        try:
            return await self.run(
                script, uuid4().hex, *arguments, on_uncertain=lambda: uncertain.append(True), must_confirm=True
            )
        except Unavailable as error:
            if not uncertain:
                raise
            raise perhaps_done(error) from error

    async def run_each(
        self,
        script: Script,
        calls: Sequence[Sequence[Argument]],
        *,
        on_uncertain: Callable[[], object] | None = None,
        retry_for: float | None = None,
        extra_time: float = 0.0,
        must_confirm: bool = False,
        on_refused: Callable[[list[Any]], object] | None = None,
    ) -> list[Any]:
        """Returns the answer of the script to each of these arguments; see ``evaluate_each``."""
        given: tuple[Argument, ...] = (self._instant, self.name)
        return await self.evaluate_each(
            script,
            self.address.keys,
            [(*given, *arguments) for arguments in calls],
            on_uncertain=on_uncertain,
            retry_for=retry_for,
            extra_time=extra_time,
            after=self._confirm if must_confirm and self.is_confirmed else None,
            on_refused=on_refused,
        )

    async def _confirm(self, connection: RedisConnection) -> None:
        """Waits until disk and replicas have this connection's last write: a mark, as a repeat may write nothing."""
        wanted, milliseconds = self.address.replicas, int(self._confirmed * 1000)
        synced = self.address.durability == "waitaof"
        wait = ("WAITAOF", 1, wanted, milliseconds) if synced else ("WAIT", wanted, milliseconds)
        marked, answer = await connection.ask_each([("EVAL", _MARK, 1, self.address.prefix + "nothing"), wait])
        for error in (answer, marked):
            if redis.is_not_serving(error):  # what was done here may be lost, or there
                raise driver.ConnectionError(str(error))
            if isinstance(error, driver.ResponseError):
                raise WriteNotConfirmed(str(error))
        local, others = answer if synced else (1, answer)
        if not local or others < wanted:
            late = f"{others} of {wanted} replicas had it" if local else "its disk did not have it"
            raise WriteNotConfirmed(f"{late} within {self._confirmed:g} s")


LEVELS = ("none", "everysec", "waitaof", "always")
"""Durability of an acknowledged write, the weakest first. ``waitaof`` and ``always`` are equal."""

_NAMES = {"schedule": "schedule", "ready": "ready", "leases": "leases", "job": "job:"}
"""The keys whose names can be chosen, and their names unless they are."""
_CHANNELS = ("ready_jobs", "commands", "ended")
_OWN = ("namespace", "prefix", "durability", "replicas", "task", "payload", "ids", *_NAMES)


class RedisAddress(NamedTuple):
    """Address of the jobs, connection options, and key names."""

    server: Server
    keys: tuple[str, ...]
    """Prefix, schedule, ready, leases, job."""
    durability: str
    replicas: int
    """Number of replicas that must have a write before it is acknowledged."""
    task: str
    """Task of a job that was written by hand and names none; "" for none."""
    in_one_piece: bool
    """Payloads stay in one field of their job's hash, however long."""
    ulids: bool
    """Ids are written as ULIDs, not as UUIDs."""

    @property
    def prefix(self) -> str:
        """Returns the prefix of every key."""
        return self.keys[0]


def parse_url(url: str) -> RedisAddress:
    """``redis://user:password@host:port/0?namespace=holdfast&durability=everysec``.

    ``rediss``: TLS. ``redis+sentinel://host,host/NAME/0`` and ``redis+cluster://host,host``. Parameters that are not
    ours are the driver's.
    """
    server, own = parse_server(url, own=_OWN)
    return RedisAddress(
        server=server,
        keys=_keys(own, server.kind),
        durability=_word(own, "durability", LEVELS, "everysec"),
        replicas=int(_word(own, "replicas", tuple("0123456789"), "0")),
        task=own.get("task", ""),
        in_one_piece=_word(own, "payload", ("pieces", "whole"), "pieces") == "whole",
        ulids=_word(own, "ids", ("uuid", "ulid"), "uuid") == "ulid",
    )


def _word(own: dict[str, str], name: str, known: tuple[str, ...], default: str) -> str:
    word = own.get(name, default)
    if word not in known:
        raise ConfigError(f"url: {name}={word!r} is not valid; give one of: {', '.join(known)}")
    return word


def _keys(own: dict[str, str], kind: str) -> tuple[str, ...]:
    namespace = own.get("namespace", "holdfast")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", namespace):
        raise ConfigError(f"url: namespace={namespace!r} is not valid; give 1 to 64 of A-Z a-z 0-9 . _ -")
    prefix = own.get("prefix", "{" + namespace + "}:")
    taken, parts = {*OWN_NAMES, *_CHANNELS, "nothing"}, {each.partition("@")[0] for each in prefix.split(":")[1:]}
    if not prefix or not prefix.isprintable() or len(prefix) > 100 or parts & {*_NAMES, *taken}:
        remedy = "give 1 to 100 printable characters, without a name of a key of ours after a colon"
        raise ConfigError(f"url: prefix={prefix!r} is not valid; {remedy}")
    if kind == "cluster" and not re.search(r"\{[^}]+\}", prefix):
        raise ConfigError(f"url: prefix={prefix!r} has no {{tag}}; in a cluster all keys must be in one hash slot")
    names = {name: own.get(name, default) for name, default in _NAMES.items()}
    for name, key in names.items():
        bare = key.strip(":")
        others = [other.strip(":") for each, other in names.items() if each != name]
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}:?", key) or bare in taken.union(others):
            raise ConfigError(
                f"url: {name}={key!r} is not valid; give 1 to 64 of A-Z a-z 0-9 . _ - that no other key is called"
            )
    job = names["job"] if names["job"].endswith(":") else names["job"] + ":"
    return (prefix, *(prefix + names[name].rstrip(":") for name in ("schedule", "ready", "leases")), prefix + job)
