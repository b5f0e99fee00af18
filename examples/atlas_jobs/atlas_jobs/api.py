"""Atlas Jobs' routes. They know nothing of sockets: a request in, an answer out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from atlas_jobs.table import Table
from holdfast import Holdfast, HoldfastError, Invalid, NotFound

RECENT_MINUTES = 5
_MOST_MINUTES = 525_600  # a year


@dataclass(frozen=True)
class Request:
    """What a client asks."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What it is told: a status of HTTP and a JSON document."""

    status: int
    document: Any


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a submission. Without ``max_attempts`` a job has those of the settings."""

    job_type: str
    payload: msgspec.Raw = msgspec.Raw(b'""')
    max_attempts: int | None = None
    idempotency_key: str | None = None


class Api:
    """Submits through Holdfast and reads through the table."""

    def __init__(self, app: Holdfast, table: Table) -> None:
        self._app = app
        self._table = table

    async def answer(self, request: Request) -> Answer:
        """The answer to any request; it does not raise."""
        try:
            return await self._routed(request)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Answer(400, {"error": f"body: {error}"})
        except HoldfastError as error:
            return Answer(error.http_status, {"error": str(error)})
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            return Answer(503, {"error": f"the database does not answer: {type(error).__name__}"})

    async def _routed(self, request: Request) -> Answer:
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["jobs"]:
                return await self._submit(request)
            case "GET", ["jobs", job_id]:
                return Answer(200, await self._job(_uuid(job_id)))
            case "GET", ["debug", "workers"]:
                return Answer(200, await self._table.by_worker())
            case "GET", ["debug", "workers", "summary"]:
                return Answer(200, await self._table.by_status())
            case "GET", ["metrics"]:
                return Answer(200, await self._table.metrics(_minutes(request.query)))
        raise NotFound(f"there is no {request.method} {request.path}")

    async def _submit(self, request: Request) -> Answer:
        wanted = msgspec.json.decode(request.body, type=Wanted)
        options: dict[str, Any] = {"key": wanted.idempotency_key if request.key is None else request.key}
        if wanted.max_attempts is not None:
            options["max_attempts"] = wanted.max_attempts
        draft = self._app.draft(wanted.job_type, {"payload": _text(wanted.payload)}, **options)
        handle = await self._app.submit(draft)
        return Answer(201 if handle.created else 200, await self._job(UUID(handle.id)))

    async def _job(self, job_id: UUID) -> dict[str, Any]:
        job = await self._table.job(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}")
        return job


def _text(payload: msgspec.Raw) -> str:
    """A text as it is; any other value as the client wrote it down."""
    raw = bytes(payload)
    text = msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
    if "\0" in text:
        raise Invalid("payload", text, "leave out the character NUL: a TEXT of PostgreSQL cannot hold it")
    return text


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise Invalid("job_id", text, "give a UUID") from None


def _minutes(query: Mapping[str, str]) -> int:
    text = query.get("minutes", str(RECENT_MINUTES))
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MOST_MINUTES:
        raise Invalid("minutes", text, f"give a whole number from 1 to {_MOST_MINUTES}")
    return int(text)
