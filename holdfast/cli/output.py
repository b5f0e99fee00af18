"""Output: tables and JSON, with control characters of data escaped."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from holdfast.core.encryption import describe_encrypted, is_encrypted
from holdfast.views.documents import to_builtins
from holdfast.views.formatting import UNSAFE, safe_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WORD, _TEXT, _GAP = 20, 24, 3  # widths: minimum of a word and of a text column, and the gap between columns
_WIDE = 4000  # width without a terminal, where nothing is cut or wrapped
STATE_STYLES: Mapping[str, str] = {
    "queued": "blue",
    "scheduled": "magenta",
    "waiting": "magenta",
    "running": "cyan",
    "failed": "yellow",
    "succeeded": "green",
    "dead": "red",
    "cancelled": "dim",
    "ok": "green",
    "warning": "yellow",
    "error": "red",
}
_COMMAND = re.compile(r"\bholdfast (?=[a-z])")


class Column(NamedTuple):
    """A column of a table.

    ``kind``: an "id" or a "number" is never cut or wrapped; a "word" stays on one line and may be cut; "text"
    wraps. ``spare``: left out if the terminal is too narrow, the last one first.
    """

    title: str
    kind: str = "word"
    spare: bool = False


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def print_json(document: object) -> None:
    """Prints one JSON document: indented on a terminal, else on one line."""
    click.echo(as_json(document, spread=sys.stdout.isatty()))


def print_json_line(document: object) -> None:
    """Prints one line of JSON lines."""
    click.echo(as_json(document))
    sys.stdout.flush()


def as_json(document: object, *, spread: bool = False) -> str:
    """Encodes JSON. Characters that ``safe_text`` escapes are JSON escapes here, so the document stays the same."""
    text = json.dumps(document, ensure_ascii=False, indent=2 if spread else None, default=to_builtins)

    def escape_match(found: re.Match[str]) -> str:
        return found.group() if found.group() == "\n" else f"\\u{ord(found.group()):04x}"

    return UNSAFE.sub(escape_match, text)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────
def make_console(*, stderr: bool = False) -> Console:
    """Returns rich's console: as wide as the terminal, unlimited elsewhere. Colours: on a terminal, unless NO_COLOR."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else _WIDE,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


def make_table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> Table:
    """Builds a table of escaped text; names of states are coloured."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    to = make_console()
    listed = [[safe_text("-" if cell is None else cell) for cell in row] for row in rows]
    made = Table(box=box.SIMPLE_HEAD if to.is_terminal else None, pad_edge=False, header_style="bold")
    shown = fitting_columns(columns, listed, to.width)
    for index in shown:
        column = columns[index]
        made.add_column(
            column.title,
            justify="right" if column.kind == "number" else "left",
            no_wrap=column.kind != "text",
            overflow="ellipsis" if column.kind == "word" else "fold",
            min_width=_least(column, listed, index),
        )
    for row in listed:
        made.add_row(*(Text(row[index], style=STATE_STYLES.get(row[index], "")) for index in shown))
    return made


def fitting_columns(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Returns the indexes of the columns that fit; spare ones are left out, the last one first."""
    shown = list(range(len(columns)))
    spare = [index for index in shown if columns[index].spare]
    while spare and sum(_least(columns[index], rows, index) + _GAP for index in shown) > width:
        shown.remove(spare.pop())
    return shown


def _least(column: Column, rows: Sequence[Sequence[str]], index: int) -> int:
    """Returns the minimum width of a column."""
    natural = max([len(column.title), *(len(row[index]) for row in rows)])
    return min(natural, {"word": _WORD, "text": _TEXT}.get(column.kind, natural))


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]], *, empty: str = "nothing") -> None:
    """Prints a table; ``empty`` if it has no row."""
    listed = list(rows)
    if not listed:
        click.echo(empty)
        return
    to = make_console()
    with to.capture() as captured:
        to.print(make_table(columns, listed))
    for line in captured.get().splitlines():
        click.echo(line.rstrip(), color=to.is_terminal)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Prints one name and value per line; None is left out."""
    listed = [(name, safe_text(value)) for name, value in facts if value is not None]
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        click.echo(f"{click.style(name.ljust(width), dim=True)}  {value}")


def name_program(text: str) -> str:
    """Returns a text whose commands begin as this program was called: ``python manage.py holdfast``, or ``--app``."""
    context = click.get_current_context()
    app = context.obj.app or "none"
    is_own = app != "none" and not app.startswith("holdfast.")  # one in this package: manage.py gives it
    given = f"--app {shlex.quote(app)} " if is_own else ""
    return _COMMAND.sub(lambda _: f"{context.find_root().info_name} {given}", text)


def print_note(text: str) -> None:
    """Prints a remark to stderr; stdout holds only the result."""
    click.echo(safe_text(text), err=True)


def print_heading(text: str) -> None:
    """Prints the title of a section."""
    click.echo()
    click.secho(text, bold=True)


def print_block(text: str) -> None:
    """Prints text of several lines, indented and escaped."""
    for line in text.splitlines():
        click.echo("  " + safe_text(line.replace("\t", "    ")))


def pretty_json(text: str | None) -> str:
    """Formats stored JSON text with indentation; a placeholder for encrypted text."""
    if text is None:
        return "null"
    return describe_encrypted(text) if is_encrypted(text) else as_json(json.loads(text), spread=True)
