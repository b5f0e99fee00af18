"""Guards of SQL: each predicate of each statement and function, and each row lock.

sqlglot reads the tokens. Its parser is not used: it knows neither PL/pgSQL nor all of these statements, and what it
writes differs from what was written (`+column`). A predicate keeps its operands, so that parameters keep their types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sqlglot import Dialect
from sqlglot.tokens import Token

from tools.mutants.guards import BOUNDARIES, Guard

_PART = re.compile(r"^-- (?:name|own|fragment): (\w+)\n|^create (?:or replace )?function holdfast\.(\w+)", re.MULTILINE)
_QUOTED = re.compile(r"\$(\w*)\$")
_STARTS = {"WHERE", "HAVING", "ON", "WHEN", "IF", "ELSIF"}
_ENDS = re.compile(
    r"WHERE|HAVING|WINDOW|LIMIT|OFFSET|RETURNING|UNION|EXCEPT|INTERSECT|JOIN|LEFT|RIGHT|INNER|CROSS|FULL|ON|FOR|DO|THEN"
    r"|ELSE|END|LOOP|GROUP( BY)?|ORDER( BY)?|;|,"
)
_NOT_JOINED = {"CONFLICT", "DELETE", "UPDATE", "COMMIT"}
_BOTH = {"true": b"(%s or true)", "false": b"(%s and false)"}


def sql_guards(source: bytes) -> Iterator[Guard]:
    """Yields the guards of each part of a file."""
    text = source.decode()
    for name, begin, sql in parts_of(text):
        yield from _Part(sql, text, begin, name).guards()


def parts_of(text: str) -> Iterator[tuple[str, int, str]]:
    """Yields name, offset and SQL of each part: a named statement or fragment, or a function of a migration."""
    parts = list(_PART.finditer(text))
    for at, part in enumerate(parts):
        begin, end = part.end(), parts[at + 1].start() if at + 1 < len(parts) else len(text)
        opening = _QUOTED.search(text, begin, end) if part[2] else None
        if opening is not None:
            yield part[2], opening.end(), text[opening.end() : text.index(opening[0], opening.end())]
        elif part[1]:
            yield part[1], begin, text[begin:end]


class _Part:
    def __init__(self, sql: str, text: str, offset: int, place: str) -> None:
        self._text, self._offset, self._place = text, offset, place
        self._tokens = Dialect.get_or_raise("postgres").tokenize(sql)
        self._words = [token.text.upper() for token in self._tokens]

    def guards(self) -> Iterator[Guard]:
        """Yields the guards in the order of the text."""
        searched: list[bool] = []  # of each open CASE
        if self._tokens and self._words[0] in ("(", "NOT", ":"):
            yield from self._conditions(0, self._end_of(0), ("true",))  # a fragment that is a condition
        for at, word in enumerate(self._words):
            following = self._words[at + 1] if at + 1 < len(self._words) else ""
            if word == "CASE":
                searched.append(following == "WHEN")
            elif word == "END" and searched and following not in ("IF", "LOOP"):
                searched.pop()
            elif word == "FOR" and following in ("UPDATE", "NO", "SHARE", "KEY"):
                yield self._lock(at)
            elif word in _STARTS and following not in _NOT_JOINED and self._begins(at, word, searched):
                both = word in ("WHEN", "IF", "ELSIF")
                yield from self._conditions(at + 1, self._end_of(at + 1), ("true", "false") if both else ("true",))

    def _begins(self, at: int, word: str, searched: Sequence[bool]) -> bool:
        if word == "WHEN":  # of a searched CASE, or EXIT WHEN; not of a simple CASE
            return bool(searched and searched[-1]) or self._words[at - 1] in ("EXIT", "CONTINUE")
        return word not in ("IF", "ELSIF") or at == 0 or self._words[at - 1] != "END"

    def _end_of(self, at: int) -> int:
        depth = cases = 0
        for place in range(at, len(self._words)):
            word = self._words[place]
            if word in ("(", "["):
                depth += 1
            elif word in (")", "]"):
                depth -= 1
                if depth < 0:
                    return place
            elif word == "CASE":
                cases += 1
            elif word == "END" and cases:
                cases -= 1
            elif not depth and not cases and _ENDS.fullmatch(word) and not self._is_called(place):
                return place
        return len(self._words)

    def _is_called(self, at: int) -> bool:
        return self._words[at] in ("LEFT", "RIGHT") and self._words[at + 1 : at + 2] == ["("]

    def _conditions(self, at: int, end: int, values: Sequence[str]) -> Iterator[Guard]:
        for operator, neutral in (("OR", "false"), ("AND", "true")):
            pieces = self._split(at, end, operator)
            if len(pieces) > 1:
                for each in pieces:
                    yield from self._conditions(*each, (neutral,))
                return
        if at < end and self._words[at] == "(" and self._end_of(at + 1) == end - 1 and self._words[at + 1] != "SELECT":
            yield from self._conditions(at + 1, end - 1, values)
        elif at < end and self._words[at:end] != ["TRUE"]:
            start, stop = self._span(at, end)
            shown = self._text[start:stop].encode()
            changes = {value: _BOTH[value] % shown for value in values}
            signs = [place for place, _ in self._outer(at, end) if self._words[place] in BOUNDARIES]
            if len(signs) == 1:
                sign = BOUNDARIES[self._words[signs[0]]]
                begin, behind = self._span(signs[0], signs[0] + 1)
                changes[sign] = (self._text[start:begin] + sign + self._text[behind:stop]).encode()
            yield self._guard(start, stop, changes)

    def _split(self, at: int, end: int, operator: str) -> list[tuple[int, int]]:
        pieces, begin, between = [], at, False
        for place, word in self._outer(at, end):
            if word == "BETWEEN":
                between = True
            elif word == operator and not (between and operator == "AND"):
                pieces.append((begin, place))
                begin = place + 1
            elif word == "AND":
                between = False
        return [*pieces, (begin, end)]

    def _outer(self, at: int, end: int) -> Iterator[tuple[int, str]]:
        """Yields the words that stand in no parentheses and in no CASE."""
        depth = 0
        for place in range(at, end):
            word = self._words[place]
            depth -= word in (")", "]", "END")
            if not depth:
                yield place, word
            depth += word in ("(", "[", "CASE")

    def _lock(self, at: int) -> Guard:
        stop = at + 1
        while stop < len(self._words) and self._words[stop] in (
            "NO",
            "KEY",
            "UPDATE",
            "SHARE",
            "SKIP",
            "LOCKED",
            "NOWAIT",
        ):
            stop += 1
        return self._guard(*self._span(at, stop), {"removed": b""})

    def _span(self, at: int, end: int) -> tuple[int, int]:
        tokens: Sequence[Token] = self._tokens
        return tokens[at].start + self._offset, tokens[end - 1].end + 1 + self._offset

    def _guard(self, start: int, stop: int, changes: dict[str, bytes]) -> Guard:
        before = len(self._text[:start].encode())
        return Guard(self._place, before, before + len(self._text[start:stop].encode()), changes)
