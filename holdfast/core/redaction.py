"""Redaction: hides the fields listed in the setting ``redacted`` wherever jobs are shown.

Handlers, and workers in other languages, get everything. ``*`` in a path is any one field, ``**`` any number of them;
a list is passed through: ``payload.cards.number`` is the number of every card.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from holdfast.core.encryption import MARKER, is_encrypted, key_id_of
from holdfast.core.job_logs import LogLine
from holdfast.core.lifecycle import MAX_ERROR_LENGTH
from holdfast.core.models import Attempt, Job, Step

REDACTED = "[redacted]"
_LEAST = 4  # shortest hidden value that is searched for in error texts: shorter ones occur in every text
_UNKNOWN = "\0encrypted"  # stands for hidden values that cannot be decrypted here: no text that may quote one is shown
_MAX_HIDDEN = 100  # maximum number of hidden values that are searched for: a text that may quote more is not shown
_CUT_LINE = re.compile(r"(.*)(… \(\d+ characters\).*)", re.DOTALL)

Path = tuple[str, ...]


class Redaction:
    """Hides fields by the dotted paths of the setting."""

    def __init__(self, paths: Sequence[str]) -> None:
        split = [tuple(path.split(".")) for path in paths]
        self._of = {
            root: tuple(path[1:] for path in split if path[0] == root)
            for root in ("payload", "result", "metadata", "lines")
        }
        self._errors = ("error",) in split
        self.hides = bool(split)
        """True if any field is hidden; error texts may quote one."""

    def redact_job(self, job: Job) -> Job:
        """Returns the job with hidden values replaced."""
        hidden: list[Any] = []
        changes: dict[str, Any] = {}
        payload = self._text("payload", job.payload, hidden)
        if payload != job.payload:
            changes["payload"] = payload
        if job.result is not None and self._of["result"]:
            changes["result"] = self._text("result", job.result, hidden)
        metadata = job.options_or_default.metadata
        if metadata is not None and self._of["metadata"]:
            found = _redact_paths(metadata, self._of["metadata"], hidden)
            kept = found if isinstance(found, dict) else {REDACTED: True}
            changes["options"] = msgspec.structs.replace(job.options_or_default, metadata=kept)
        if job.error is not None:
            changes["error"] = self._error(job.error, _quotations(hidden))
        return msgspec.structs.replace(job, **changes) if changes else job

    def redact_attempts(self, job: Job, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Returns the attempts of this job with hidden values replaced."""
        quoted = _quotations(self._hidden(job))
        return [
            msgspec.structs.replace(
                each,
                error=None if each.error is None else self._error(each.error, quoted),
                traceback=None if each.traceback is None else self._error(each.traceback, quoted),
            )
            for each in attempts
        ]

    def redact_steps(self, steps: Sequence[Step]) -> list[Step]:
        """Returns steps with hidden values replaced, as in the result of a job."""
        return [
            step
            if step.result is None or not self._of["result"]
            else msgspec.structs.replace(step, result=self._text("result", step.result, []))
            for step in steps
        ]

    def redact_logs(self, job: Job, lines: Sequence[LogLine]) -> list[LogLine]:
        """Returns the job's log lines with hidden values replaced, quotations of the job included."""
        if not self.hides:
            return list(lines)
        hidden = self._hidden(job)
        return [self._line(each, hidden) for each in lines]

    def _line(self, line: LogLine, hidden: Sequence[Any]) -> LogLine:
        own: list[Any] = []
        fields = line.fields
        quoted = _quotations(hidden)
        if quoted is None:
            return msgspec.structs.replace(line, text=REDACTED, fields=None if fields is None else json.dumps(REDACTED))
        if fields is not None:
            try:
                found = _redact_paths(json.loads(fields), self._of["lines"], own)
            except (ValueError, RecursionError):
                found = REDACTED  # corrupt: its fields cannot be parsed
            fields = json.dumps(_redact_quotations(found, quoted), ensure_ascii=False, separators=(",", ":"))
            quoted = _quotations([*hidden, *own])
        if () in self._of["lines"] or quoted is None:
            return msgspec.structs.replace(line, text=REDACTED, fields=fields)
        cut = _CUT_LINE.fullmatch(line.text)
        text = _redact_cut_end(cut[1], quoted) + cut[2] if cut else line.text
        return msgspec.structs.replace(line, text=_redact_quotations(text, quoted), fields=fields)

    def _hidden(self, job: Job) -> list[Any]:
        """Returns the hidden values of the job."""
        hidden: list[Any] = []
        self._text("payload", job.payload, hidden)
        if job.result is not None:
            self._text("result", job.result, hidden)
        _redact_paths(job.options_or_default.metadata, self._of["metadata"], hidden)
        return hidden

    def _text(self, root: str, text: str, hidden: list[Any]) -> str:
        paths = self._of[root]
        if not paths:
            return text
        if is_encrypted(text):
            hidden.append(_UNKNOWN)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return json.dumps(REDACTED)  # corrupt: its fields cannot be parsed
        shown = _redact_paths(value, paths, hidden)
        if isinstance(shown, dict) and key_id_of(text) is not None:
            shown[MARKER] = value[MARKER]
        return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))

    def _error(self, text: str, quoted: Sequence[str] | None) -> str:
        """Returns an error text with quotations of hidden values replaced."""
        if self._errors or quoted is None:
            return REDACTED
        if len(text) >= MAX_ERROR_LENGTH:
            text = _redact_cut_end(text, quoted)
        return str(_redact_quotations(text, quoted))


def _redact_paths(value: Any, paths: Sequence[Path], hidden: list[Any]) -> Any:
    """Returns the value with the target of each path replaced."""
    if any(not path or path == ("**",) for path in paths):
        hidden.append(value)
        return REDACTED
    match value:
        case list():
            return [_redact_paths(each, paths, hidden) for each in value]
        case dict():
            return {name: _inside(name, each, paths, hidden) for name, each in value.items()}
    return value


def _redact_quotations(value: Any, given: Sequence[str]) -> Any:
    """Returns the value with these texts replaced in every text of it, and numbers equal to one of them."""
    match value:
        case str():
            for each in given:
                value = value.replace(each, REDACTED)
            return value
        case list():
            return [_redact_quotations(each, given) for each in value]
        case dict():
            return {name: _redact_quotations(each, given) for name, each in value.items()}
    return REDACTED if str(value) in given else value


def _inside(name: str, value: Any, paths: Sequence[Path], hidden: list[Any]) -> Any:
    further = [left for path in paths for left in _remaining_paths(name, path)]
    return _redact_paths(value, further, hidden) if further else value


def _remaining_paths(name: str, path: Path) -> Iterator[Path]:
    """Yields the rest of each path behind the field of this name."""
    if path[0] == "**":
        yield path
        yield from _remaining_paths(name, path[1:])
    elif path[0] in ("*", name):
        yield path[1:]


def _quotations(hidden: Sequence[Any]) -> list[str] | None:
    """Returns the texts that quote hidden values, the longest first: plain, and as Python and JSON write them in
    quotation marks. None: they are unknown, or too many."""
    found: set[str] = set()
    for each in _scalars(hidden):
        text = str(each)
        if len(text) >= _LEAST and not isinstance(each, bool) and each is not None:
            found.add(text)
        if text == _UNKNOWN or len(found) > _MAX_HIDDEN:
            return None
    texts = {
        quoted
        for each in found
        for quoted in (
            each,
            repr(each)[1:-1],
            repr('"' + each)[2:-1],
            json.dumps(each)[1:-1],
            json.dumps(each, ensure_ascii=False)[1:-1],
        )
    }
    return sorted(texts, key=len, reverse=True)


def _redact_cut_end(text: str, quoted: Sequence[str]) -> str:
    """Returns a text that was cut, with the beginning of a quotation at its end replaced."""
    for each in quoted:
        start = text.find(each[:_LEAST], max(0, len(text) - len(each)))
        while start >= 0:
            if each.startswith(text[start:]):
                return text[:start] + REDACTED
            start = text.find(each[:_LEAST], start + 1)
    return text


def _scalars(value: Any) -> Iterator[Any]:
    match value:
        case list():
            for each in value:
                yield from _scalars(each)
        case dict():
            for each in value.values():
                yield from _scalars(each)
        case _:
            yield value
