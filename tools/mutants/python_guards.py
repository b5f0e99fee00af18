"""Guards of a Python module: conditions, comparisons, ``raise`` and early ``return``.

A guard keeps its operands (``(guard or True)``), so that a mutated function has the free variables of the original
one: ``server.py`` exchanges the code of functions that exist already.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tools.mutants.guards import BOUNDARIES, Guard, Mutant

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ORDERS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def python_guards(source: bytes) -> Iterator[Guard]:
    """Yields the guards in the functions of a module."""
    yield from _Finder(source).guards(ast.parse(source), ())


def statement_places(source: bytes) -> dict[int, tuple[str, str]]:
    """Returns for each line in a function the function, and the function with the first line of the line's statement.

    Both are names of places that stay when the lines around them change.
    """
    lines = source.decode().splitlines()
    places: dict[int, tuple[str, str]] = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = (*names, child.name) if isinstance(child, (*_FUNCTIONS, ast.ClassDef)) else names
            if isinstance(child, ast.stmt) and names:
                place = ".".join(names)
                line = (place, f"{place}::{lines[child.lineno - 1].strip()}")
                places.update(dict.fromkeys(range(child.lineno, (child.end_lineno or child.lineno) + 1), line))
            visit(child, inner)

    visit(ast.parse(source), ())
    return places


def reach_names(mutant: Mutant, source: bytes, lines: dict[int, tuple[str, str]]) -> list[str]:
    """Returns the names by which tests are found that reach a mutant, the most exact first. ``lines``: of
    ``statement_places``, for a Python module."""
    line = lines.get(source.count(b"\n", 0, mutant.start) + 1)
    exact = f"{mutant.file}::{line[1]}" if line else mutant.site
    return [exact, f"{mutant.file}::{mutant.place}"]


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._conditions_seen: set[ast.AST] = set()
        self._only_statements: set[ast.AST] = set()  # each alone in an ``if``, whose condition is the guard
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def guards(self, node: ast.AST, names: tuple[str, ...]) -> Iterator[Guard]:
        """Yields the guards below a node that stands in the functions and classes ``names``."""
        tails = _tails(node.body) if isinstance(node, _FUNCTIONS) else set()
        for child in _descend(node):
            if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
                yield from self.guards(child, (*names, child.name))
            elif names:
                yield from self._at(child, ".".join(names), tails)

    def _at(self, node: ast.AST, place: str, tails: set[ast.AST]) -> Iterator[Guard]:
        if isinstance(node, ast.If) and len(node.body) == 1 and not node.orelse:
            self._only_statements.add(node.body[0])
        match node:
            case ast.If(test=test) | ast.IfExp(test=test):
                yield from self._conditions(test, place, (b"True", b"False"))
            case ast.While(test=test) if not isinstance(test, ast.Constant):
                yield from self._conditions(test, place, (b"False",))
            case ast.comprehension(ifs=tests):
                for each in tests:
                    yield from self._conditions(each, place, (b"True", b"False"))
            case ast.match_case(guard=ast.expr() as test):
                yield from self._conditions(test, place, (b"True", b"False"))
            case ast.Compare() | ast.BoolOp() if node not in self._conditions_seen:
                yield from self._conditions(node, place, (b"True", b"False"), compared=True)
            case ast.Raise() if node not in self._only_statements:
                yield self._without(node, place)
            case ast.Return() if node not in tails and node not in self._only_statements:
                yield self._without(node, place)

    def _conditions(
        self, node: ast.expr, place: str, values: Sequence[bytes], *, compared: bool = False
    ) -> Iterator[Guard]:
        """Yields the leaves of a condition. ``compared``: of a value, only its comparisons."""
        self._conditions_seen.add(node)
        if isinstance(node, ast.BoolOp):
            neutral = b"True" if isinstance(node.op, ast.And) else b"False"
            for each in node.values:
                yield from self._conditions(each, place, (neutral,), compared=compared)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            flipped = [b"False" if value == b"True" else b"True" for value in values]
            yield from self._conditions(node.operand, place, flipped, compared=compared)
        elif isinstance(node, ast.Compare) or not compared:
            start, end = self._span(node)
            text = self._source[start:end]
            changes = {
                value.decode().lower(): b"((%s) %s %s)" % (text, b"or" if value == b"True" else b"and", value)
                for value in values
            }
            yield Guard(place, start, end, {**changes, **self._boundary(node, start, end)})

    def _boundary(self, node: ast.expr, start: int, end: int) -> dict[str, bytes]:
        if not isinstance(node, ast.Compare) or len(node.ops) != 1 or type(node.ops[0]) not in _ORDERS:
            return {}
        sign = _ORDERS[type(node.ops[0])]
        left, right = self._span(node.left)[1], self._span(node.comparators[0])[0]
        between = self._source[left:right].replace(sign.encode(), BOUNDARIES[sign].encode(), 1)
        return {BOUNDARIES[sign]: b"(%s%s%s)" % (self._source[start:left], between, self._source[right:end])}

    def _without(self, node: ast.stmt, place: str) -> Guard:
        start, end = self._span(node)
        return Guard(place, start, end, {"removed": b"if False: " + self._source[start:end]})

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        begin = self._lines[node.lineno - 1] + node.col_offset
        return begin, self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


def _descend(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes below, parents first, but none inside functions and classes, nor f-strings, whose positions are
    wrong before Python 3.12."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            continue
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield from _descend(child)


def _tails(body: Sequence[ast.stmt]) -> set[ast.AST]:
    """Returns the statements after which a function ends anyway."""
    match body[-1]:
        case ast.With(body=inner) | ast.AsyncWith(body=inner):
            return _tails(inner)
        case ast.If(body=inner, orelse=[_, *_] as other):
            return _tails(inner) | _tails(other)
        case ast.Try(body=inner, orelse=other):
            return _tails(other or inner)
        case ast.Match(cases=cases):
            return {tail for each in cases for tail in _tails(each.body)}
        case last:
            return {last}
