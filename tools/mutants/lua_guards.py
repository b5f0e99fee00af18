"""Guards of the Lua scripts: the parts of each condition, comparisons of values, and ``return``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import tree_sitter_lua
from tree_sitter import Language, Node, Parser

from tools.mutants.guards import BOUNDARIES, Guard

_PART = re.compile(rb"^-- (?:name|fragment): (\w+).*\n", re.MULTILINE)
_COMPARISONS = {"<", "<=", ">", ">=", "==", "~="}
_FUNCTIONS = ("function_declaration", "function_definition")


def lua_guards(source: bytes) -> Iterator[Guard]:
    """Yields the guards of each part of a file: a part begins with a line ``-- name:`` or ``-- fragment:``."""
    parser = Parser(Language(tree_sitter_lua.language()))
    parts = list(_PART.finditer(source))
    for at, part in enumerate(parts):
        end = parts[at + 1].start() if at + 1 < len(parts) else len(source)
        tree = parser.parse(source[part.end() : end])
        if tree.root_node.has_error:
            raise ValueError(f"cannot parse the part {part[1].decode()}")
        for guard in _guards(tree.root_node, part[1].decode()):
            yield guard._replace(start=guard.start + part.end(), end=guard.end + part.end())


def _guards(node: Node, place: str) -> Iterator[Guard]:
    inside = place
    if node.type in _FUNCTIONS and (name := node.child_by_field_name("name")) is not None:
        inside = f"{place.partition('.')[0]}.{_text(name)}"
    condition = node.child_by_field_name("condition")
    if condition is not None:
        values = {"while_statement": ["false"], "repeat_statement": ["true"]}.get(node.type, ["true", "false"])
        yield from _conditions(condition, inside, values)
    elif node.type == "return_statement":
        yield from _return(node, inside)
    for child in node.children:
        if child == condition:
            yield from _inside_condition(child, inside)
        elif _operator(child) in {"and", "or", *_COMPARISONS}:
            yield from _conditions(child, inside, ["true", "false"], compared=True)
            yield from _inside_condition(child, inside)
        else:
            yield from _guards(child, inside)


def _inside_condition(node: Node, place: str) -> Iterator[Guard]:
    """Yields guards of functions that are defined, or called, in a condition."""
    for child in node.children:
        if child.type in ("function_definition", "arguments"):
            yield from _guards(child, place)
        else:
            yield from _inside_condition(child, place)


def _conditions(node: Node, place: str, values: Sequence[str], *, compared: bool = False) -> Iterator[Guard]:
    operator = _operator(node)
    if node.type == "parenthesized_expression":
        yield from _conditions(node.named_children[0], place, values, compared=compared)
    elif operator in ("and", "or"):
        neutral = "true" if operator == "and" else "false"
        for side in ("left", "right"):
            yield from _conditions(_field(node, side), place, [neutral], compared=compared)
    elif operator == "not":
        flipped = ["false" if value == "true" else "true" for value in values]
        yield from _conditions(node.named_children[0], place, flipped, compared=compared)
    elif operator in _COMPARISONS or not compared:
        changes = {value: value.encode() for value in values}
        if operator in BOUNDARIES:
            sign = BOUNDARIES[operator]
            changes[sign] = f"{_text(_field(node, 'left'))} {sign} {_text(_field(node, 'right'))}".encode()
        yield Guard(place, node.start_byte, node.end_byte, changes)


def _return(node: Node, place: str) -> Iterator[Guard]:
    """Yields an early return, which falls through when it is removed; of a last one, the value."""
    block = node.parent
    owner = block.parent if block is not None else None
    if owner is not None and owner.type == "if_statement" and len(_statements(block)) == 1 and _has_one_branch(owner):
        return  # the condition is the guard
    if owner is None or owner.type in _FUNCTIONS:
        if node.named_child_count:
            yield Guard(place, node.start_byte, node.end_byte, {"nil": b"return nil"})
    else:
        yield Guard(place, node.start_byte, node.end_byte, {"removed": b""})


def _statements(block: Node | None) -> list[Node]:
    return [each for each in (block.named_children if block is not None else ()) if each.type != "comment"]


def _has_one_branch(statement: Node) -> bool:
    return not any(each.type in ("elseif_statement", "else_statement") for each in statement.children)


def _operator(node: Node) -> str:
    if node.type == "binary_expression":
        return node.children[1].type
    return node.children[0].type if node.type == "unary_expression" else ""


def _field(node: Node, name: str) -> Node:
    found = node.child_by_field_name(name)
    if found is None:
        raise ValueError(f"a {node.type} of tree-sitter-lua has no field {name!r}")
    return found


def _text(node: Node) -> str:
    return (node.text or b"").decode()
