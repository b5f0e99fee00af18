"""How stores keep a schedule: one JSON document, with its next tick and its revision beside it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from holdfast.core.schedule import Schedule

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Schedule).decode
_log = logging.getLogger(__name__)


def encode_schedule(schedule: Schedule) -> str:
    """The document of a schedule, without its revision, which stands beside it."""
    return _encode(replace(schedule, revision=0)).decode()


def decode_schedules(rows: Iterable[tuple[str | bytes, int]]) -> list[Schedule]:
    """Schedules of documents and revisions. One that another program spoiled is left out, with a warning."""
    schedules = []
    for document, revision in rows:
        try:
            schedules.append(replace(_decode(document), revision=revision))
        except msgspec.MsgspecError as error:
            _log.warning("a stored schedule cannot be read: %s; remove and add it again", error)
    return schedules
