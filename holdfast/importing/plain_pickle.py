"""Reads pickles of plain values without an unpickler: no class is looked up and no function is called.

A pickle is a program for a stack machine, and an unpickler runs whatever it names. This reader knows only the opcodes
that build None, bool, int, float, str, bytes, list, tuple and dict.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

_MARK = object()
_IGNORED = frozenset({"PROTO", "FRAME"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    }
)
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT, _GET = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")


class NotPlain(ValueError):
    """The pickle is damaged, names a class or a function, or grows beyond the limit when it is written out."""


def read_plain_pickle(data: bytes, limit: int) -> Any:
    """Returns the value of a pickle; NotPlain unless it is made of plain values.

    ``limit``: number of characters and elements that it may have, values that it repeats counted each time.
    """
    try:
        value = _read(data)
        size = _expanded_size(value, {}, limit)
    except NotPlain:
        raise
    except Exception as error:  # of pickletools, or a stack that does not fit the opcodes
        raise NotPlain(f"it is no pickle that can be read: {type(error).__name__}") from None
    if size > limit:
        raise NotPlain(f"its values have more than {limit:,} characters and elements")
    return value


def _read(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "STOP":
            break
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _PUT:
            memo[int(argument)] = stack[-1]
        elif name in _GET:
            stack.append(memo[int(argument)])
        elif name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name not in _IGNORED:
            _build(name, stack)
    (value,) = stack
    return value


def _build(name: str, stack: list[Any]) -> None:
    """Applies an opcode that puts elements into a container."""
    if name in _TUPLES:
        count = _TUPLES[name]
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "TUPLE":
        stack.append(tuple(_pop_to_mark(stack)))
    elif name == "LIST":
        stack.append(_pop_to_mark(stack))
    elif name in ("APPEND", "APPENDS"):
        elements = _pop_to_mark(stack) if name == "APPENDS" else [stack.pop()]
        list.extend(stack[-1], elements)
    elif name in ("SETITEM", "SETITEMS", "DICT"):
        pairs = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _pop_to_mark(stack)
        if name == "DICT":
            stack.append({})
        keys = pairs[::2]
        if any(isinstance(key, tuple) for key in keys):  # hashing one can take for ever: it may repeat its parts
            raise NotPlain("it holds a dictionary with a tuple as key")
        dict.update(stack[-1], zip(keys, pairs[1::2], strict=True))
    else:
        raise NotPlain(f"it holds more than plain values (opcode {name})")


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    position = len(stack) - 1
    while stack[position] is not _MARK:
        position -= 1
    elements = stack[position + 1 :]
    del stack[position:]
    return elements


def _expanded_size(value: Any, known: dict[int, int], limit: int) -> int:
    """Returns the size of a value, shared parts counted each time; more than the limit if it contains itself."""
    if isinstance(value, str | bytes):
        return 1 + len(value)
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in known:
        known[id(value)] = limit + 1  # stays if the value contains itself
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_expanded_size(part, known, limit) for part in parts)
    return known[id(value)]
