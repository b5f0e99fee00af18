"""Parts shared by the SQL stores: codes of states, named statements and numbered migrations from `.sql` files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources.abc import Traversable
from typing import NamedTuple

from holdfast.core.dependencies import NEVER_US
from holdfast.core.errors import Invalid
from holdfast.core.models import Finding, JobState

CODES = {
    JobState.QUEUED: 0,
    JobState.SCHEDULED: 1,
    JobState.RUNNING: 2,
    JobState.FAILED: 3,
    JobState.WAITING: 4,
    JobState.SUCCEEDED: 5,
    JobState.DEAD: 6,
    JobState.CANCELLED: 7,
}
"""How a state stands in a row."""
STATES = tuple(CODES)
"""State by code."""

_PART = re.compile(r"^-- (name|own|fragment): (\w+)$", re.MULTILINE)
_INCLUDE = re.compile(r"-- include: (\w+)$", re.MULTILINE)
_NUMBERED = re.compile(r"^(\d{4})_\w+\.sql$")
_SPAN = re.compile(r"(\d{1,4})\.\.(\d{1,4})")


class Migration(NamedTuple):
    """A step of the schema: append only, never edited once released."""

    number: int
    name: str
    script: str

    @property
    def expands(self) -> bool:
        """Returns True if it only adds, so that the version before keeps working: its first line says ``-- expand``."""
        return self.script.startswith("-- expand")


def load_statements(source: Traversable) -> Mapping[str, str]:
    """The statements of a file by name: a line ``-- name: claim`` starts one, ``-- own: claim`` one that no other store
    has.

    A line ``-- fragment: job_json`` starts a part of several statements; ``-- include: job_json``, at
    the end of a line, stands for it. ``NEVER_US`` stands for the number.
    """
    return _parsed(source.name, source.read_text(encoding="utf-8"))


@lru_cache(maxsize=4)
def _parsed(file: str, content: str) -> Mapping[str, str]:
    _, *parts = _PART.split(content.replace("NEVER_US", str(NEVER_US)))
    kinds, names, texts = parts[::3], parts[1::3], [text.strip().removesuffix(";") for text in parts[2::3]]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{file} names {twice[0]} twice")
    fragments = {name: text for kind, name, text in zip(kinds, names, texts, strict=True) if kind == "fragment"}

    def included_text(line: re.Match[str]) -> str:
        if line[1] not in fragments:
            raise ValueError(f"{file} includes {line[1]}, which it does not define")
        return fragments[line[1]]

    return {
        name: _INCLUDE.sub(included_text, text)
        for name, text in zip(names, texts, strict=True)
        if name not in fragments
    }


def load_migrations(directory: Traversable) -> list[Migration]:
    """The migrations of a store in their order."""
    found = []
    for entry in directory.iterdir():
        numbered = _NUMBERED.match(entry.name)
        if numbered:
            name = entry.name.removesuffix(".sql")
            found.append(Migration(int(numbered[1]), name, entry.read_text(encoding="utf-8")))
    return sorted(found)


def chosen_migrations(migrations: Sequence[Migration], span: str) -> list[Migration]:
    """Returns the migrations of ``FROM..TO``, FROM excluded; raises Invalid for an empty or unknown range."""
    newest = migrations[-1].number
    found = _SPAN.fullmatch(span)
    begin, end = (int(found[1]), int(found[2])) if found else (0, 0)
    if not begin < end <= newest:
        remedy = f"give FROM..TO with 0 <= FROM < TO <= {newest}: the newest migration this Holdfast knows"
        raise Invalid("sql", span, f"{remedy}; 0..{newest} is all of them")
    return [each for each in migrations if begin < each.number <= end]


def noted_script(migration: Migration, note: str) -> str:
    """A migration and the statement that writes it down, as text for people and their tools."""
    return f"{migration.script.rstrip()}\n\n{note}\n"


def nameless_queue(count: int, table: str) -> Finding:
    """A doctor's finding about jobs that wait in a queue with an empty name. ``table`` is the table of jobs."""
    if not count:
        return Finding("queue names", "ok", "no job waits in a queue with an empty name")
    text = f"{count} jobs wait in a queue with an empty name, for which no worker can be started"
    remedy = f"choose a queue: update {table} set queue = 'default' where queue = ''"  # noqa: S608 - text for the reader
    return Finding("queue names", "error", text, remedy)
