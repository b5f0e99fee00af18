"""A namespace of the Redis store as an outsider sees it: plain commands, none of the product's code."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from redis import Redis as Client
from redis import exceptions

T = TypeVar("T")

PATIENCE = 60
"""Seconds in which a server that was killed must be back."""
ENDED = ("succeeded", "dead", "cancelled")
NEVER = 253_402_300_799_000_000


class Keys:
    """The keys of one namespace without their prefix; any command is a method: ``keys.hgetall("counts")``."""

    def __init__(self, url: str, *, decode: bool = True) -> None:
        parts = urlsplit(url)
        secret = None if parts.password is None else unquote(parts.password)
        self.client = Client(port=parts.port or 6379, password=secret, protocol=2, decode_responses=decode)
        self.prefix = "{" + parse_qs(parts.query)["namespace"][0] + "}:"

    def __getattr__(self, command: str) -> Callable[..., Any]:
        return lambda name, *rest, **options: getattr(self.client, command)(self.prefix + name, *rest, **options)

    def all(self) -> set[str]:
        """The names of all keys there are."""
        found = self.patient(lambda: list(self.client.scan_iter(match=self.prefix + "*", count=1000)))
        return {key.removeprefix(self.prefix) for key in found}

    def patient(self, call: Callable[[], T]) -> T:
        """What the call returns, once the server answers."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except (exceptions.ConnectionError, exceptions.TimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def hash(self, name: str) -> dict[str, str]:
        """A whole hash."""
        return self.patient(lambda: self.client.hgetall(self.prefix + name))

    def leased(self) -> list[str]:
        """The ids that stand among the leases."""
        return self.patient(lambda: list(self.client.zrange(f"{self.prefix}leases", 0, -1)))

    def jobs(self, ids: list[str] | None = None) -> dict[str, dict[str, str]]:
        """The hashes of these jobs, or of every job, texts in pieces put together."""
        if ids is None:
            names = [name for name in self.all() if name.startswith("job:") and ":foreign:" not in name]
            ids = [name.removeprefix("job:") for name in names]
        found = {}
        for start in range(0, len(ids), 1000):
            piece = ids[start : start + 1000]
            for job, fields in zip(piece, self.patient(lambda piece=piece: self._hashes(piece)), strict=True):
                if fields:
                    texts = {name: _whole(fields, name) for name in ("payload", "result") if name in fields}
                    found[job] = fields | texts
        return found

    def _hashes(self, ids: list[str]) -> list[dict[str, str]]:
        with self.client.pipeline(transaction=False) as pipeline:
            for job in ids:
                pipeline.hgetall(f"{self.prefix}job:{job}")
            return pipeline.execute()

    def attempts(self, job: str) -> list[Any]:
        """The records of a job's attempts."""
        with Client(connection_pool=None, **_raw(self.client)) as raw:
            entries = self.patient(lambda: raw.lrange(f"{self.prefix}attempts:{job}", 0, -1))
        return [msgspec.msgpack.decode(entry) for entry in entries]

    # ── consistency ───────────────────────────────────────────────────────────────────────────────────────────
    def strays(self) -> Iterator[str]:
        """Returns the misplaced index entries of a store without other writers."""
        jobs, names = self.jobs(), {name for name in self.all() if ":foreign:" not in name}
        yield from self._miscounted(jobs)
        indexed = {job: int(seq) for name in names if name.startswith("index:") for seq, job in self.hash(name).items()}
        if indexed != {job: int(fields["seq"]) for job, fields in jobs.items()}:
            yield "the index differs"
        places = self._places(names, jobs)
        for job, fields in jobs.items():
            expected = {
                "queued": "quarantine" if int(fields.get("lost_leases", 0)) > 1 else "ready",
                "scheduled": "schedule",
                "failed": "schedule",
                "running": "leases",
                "waiting": "schedule" if int(fields["dueTime"]) < NEVER else "",
            }.get(fields["state"], f"ended:{fields['state']}")
            if places.pop(job, []) != ([expected] if expected else []):
                yield f"{job}, {fields['state']}, is not in {expected} alone"
        yield from (f"{job} is in {places[job]}, and there is no such job" for job in places)
        yield from (f"{name} has no job" for name in names if name.startswith("attempts:") and name[9:] not in jobs)
        noted = set(self.patient(lambda: list(self.client.zrange(f"{self.prefix}expiry", 0, -1))))
        waiting = ("queued", "scheduled", "failed", "waiting")
        for job, fields in jobs.items():
            may_expire = "expiresAt" in fields and "pickupTime" not in fields and fields["state"] in waiting
            if may_expire and job not in noted:
                yield f"{job} has lost its expiry"
        yield from (f"{job} is to expire, and there is no such job" for job in noted - jobs.keys())
        owners = {held.partition(" ")[2] for held in self.hash("keys").values()}
        yield from (f"{job} has lost its key" for job, fields in jobs.items() if "key" in fields and job not in owners)

    def _miscounted(self, jobs: dict[str, dict[str, str]]) -> Iterator[str]:
        counted = {name: int(number) for name, number in self.hash("counts").items()}
        found = Counter(f"{fields['state']}:{_queue(fields)}" for fields in jobs.values())
        if counted != found:
            yield f"counted {counted}, found {dict(found)}"

    def _places(self, names: set[str], jobs: dict[str, dict[str, str]]) -> dict[str, list[str]]:
        """Where each id stands, tombstones left out, and the ends of successes that were replayed since."""
        tombstones = Counter({job: int(number) for job, number in self.hash("tombstones").items()})
        places: dict[str, list[str]] = {}
        for name in names:
            if name.startswith("schedules"):  # of recurring jobs
                continue
            kind = "schedule" if name.startswith("schedule") else "ready" if name.startswith("ready") else name
            kind = "quarantine" if name.startswith("quarantine:") else kind
            if kind == "ready":
                members = Counter(self.client.lrange(self.prefix + name, 0, -1))
                members.subtract({job: tombstones[f"{name.removeprefix('ready')} {job}"] for job in members})
                ids = list(members.elements())
            elif kind in ("schedule", "quarantine", "leases", "ended:dead", "ended:cancelled"):
                ids = self.client.zrange(self.prefix + name, 0, -1)
            elif kind == "ended:succeeded":
                ends = (entry.partition(":") for entry in self.client.lrange(self.prefix + name, 0, -1))
                ids = [job for ended, _, job in ends if _stands(jobs.get(job, {}), ended)]
            elif kind == "kept:succeeded":
                kind, ids = "ended:succeeded", self.client.zrange(self.prefix + name, 0, -1)
            else:
                continue
            for job in ids:
                places.setdefault(job, []).append(kind)
        return places


def _whole(fields: dict[str, str], name: str) -> str:
    pieces = [fields[name], *(fields[f"{name}{n}"] for n in range(1, 8) if f"{name}{n}" in fields)]
    return "".join(pieces)


def _stands(fields: dict[str, str], ended: str) -> bool:
    return fields.get("state") == "succeeded" and fields.get("endTime") == ended


def _queue(fields: dict[str, str]) -> str:
    return fields["spec"].partition("\n")[0].split(" ", 2)[2]


def _raw(client: Client) -> dict[str, Any]:
    known = client.connection_pool.connection_kwargs
    return {"port": known["port"], "password": known["password"], "protocol": 2}
