"""Conversion of values to JSON text and back. A value that a round trip would change is refused, with its path.

A value is written, read again and compared, all in C. Only if the two differ does Python code walk the value, to tell
a harmless difference (a tuple came back as a list) from a loss (NaN became null, the key 1 became "1"). A plain payload
pays a fraction of a microsecond for this check.

External text (CLI, HTTP, a replay's new payload) is parsed by ``decode_object``, which is stricter than common JSON
parsers: it refuses duplicate keys, lone surrogates, and numbers that a float or Python's int limit would change.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn, TypeGuard, get_args, get_origin, get_type_hints

import msgspec

from holdfast.core.errors import Invalid, TooLarge, quote_value
from holdfast.core.validation import MAX_NESTING

MAX_PAYLOAD_BYTES = 256 * 1024
"""Maximum size of a payload in bytes of UTF-8."""
MAX_RESULT_BYTES = 1024 * 1024
"""Maximum size of a result in bytes of UTF-8."""
MAX_DIGITS = 4300
"""Maximum digits of an integer, a minus sign included: the limit of CPython and msgspec."""
MAX_OBJECT_KEY_BYTES = 1024
"""Maximum size of an object's key in bytes of UTF-8."""

_HIGHEST = 10**MAX_DIGITS - 1
_LOWEST = -(10 ** (MAX_DIGITS - 1)) + 1
_DIGITS_KEPT = f"at most {MAX_DIGITS:,} digits are kept, a minus sign counted"
_BY_IDENTITY: Any = object.__eq__
_STRINGS = re.compile(rb'"(?:[^"\\]+|\\.)*+"?', re.DOTALL)
_KEYS = re.compile(rb'"((?:[^"\\]+|\\.)*+)"(:?)', re.DOTALL)
_DEEPER = f"is nested deeper than {MAX_NESTING} levels, or contains itself"


class RawText(str):
    """Text that an error shows unquoted, in place of a value whose ``__repr__`` must not be called."""

    __slots__ = ()
    __repr__ = str.__str__


class EncodingProblem(NamedTuple):
    """A value that cannot be stored: its path inside the whole (``.a[0]``), its kind, the remedy."""

    path: str
    what: str
    remedy: str
    code: str = "invalid"

    def error(self, field: str) -> Invalid:
        return Invalid(field + self.path, RawText(self.what), self.remedy, code=self.code)


class Strictness(Enum):
    """Values that ``find_fault`` accepts in addition to those of JSON."""

    STRICT = auto()  # none: no annotation would convert them back
    LOOSE = auto()  # values with one obvious JSON form: datetime, UUID, Decimal, bytes, dataclasses, models …
    TYPED = auto()  # the content of such a value: its annotations define how it is read again


# ── reading and writing ───────────────────────────────────────────────────────────────────────────────────────────────
def is_model(kind: object) -> TypeGuard[Any]:
    """Returns True if ``kind`` is a pydantic model class. Never imports pydantic: without it there is no such class."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _to_builtins(value: Any) -> Any:
    """Encoding hook of msgspec, for pydantic models and subclasses of str, int and float."""
    if is_model(type(value)):
        return value.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _from_builtins(kind: Any, value: Any) -> Any:
    """Decoding hook of msgspec, for pydantic models. ``object`` accepts any value."""
    if not is_model(kind):
        return value
    try:
        return kind.model_validate(value)
    except sys.modules["pydantic"].ValidationError as error:
        places = (f"{'.'.join(map(str, each['loc'])) or kind.__name__}: {each['msg']}" for each in error.errors())
        raise ValueError("; ".join(places)) from None


def make_decoder(kind: Any) -> Callable[[str | bytes], Any]:
    """Returns a decoder of JSON text for the annotation ``kind``; it raises msgspec's errors."""
    return msgspec.json.Decoder(kind, dec_hook=_from_builtins).decode


def result_decoder(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Returns a decoder of results of ``function`` by its annotation; of plain JSON values if that has no JSON form."""
    try:
        kind = get_type_hints(function, include_extras=True).get("return", Any)
        if get_origin(kind) in (Awaitable, Coroutine):
            kind = get_args(kind)[-1]
        return make_decoder(kind)
    except (TypeError, NameError, AttributeError):
        return make_decoder(Any)


write = msgspec.json.Encoder(enc_hook=_to_builtins).encode
"""Encodes a value as UTF-8 JSON, without the checks of the functions below."""
decode_json = msgspec.json.Decoder().decode
"""Decodes plain JSON values."""


def encode(value: Any, field: str, max_bytes: int) -> bytes:
    """Encodes ``value`` as UTF-8 JSON within size and depth. The caller checks for losses (NaN, other keys)."""
    try:
        text = write(value)
    except Exception as error:
        raise _unwritable(value, error).error(field) from error
    if len(text) > max_bytes:
        remedy = f"at most {max_bytes:,} bytes are stored; keep the data elsewhere and pass where it is"
        raise TooLarge(field, RawText(f"{len(text):,} bytes"), remedy)
    if _too_deep(text):
        raise EncodingProblem("", "a value that " + _DEEPER, f"nest at most {MAX_NESTING} levels").error(field)
    return text


def encode_payload(payload: Mapping[str, Any], max_bytes: int = MAX_PAYLOAD_BYTES) -> str:
    """Encodes arguments by name as a payload, for a task that is known by name only.

    Values with one obvious JSON form (datetime, UUID, Decimal, dataclass, model …) are written in it; the task's
    annotations convert them back.
    """
    if not isinstance(payload, Mapping):
        raise Invalid("payload", RawText(_a(payload)), "give a mapping: the arguments by name")
    text = _exact(dict(payload), "payload", max_bytes)
    check_keys(text, "payload")
    return text.decode()


def encode_result(value: Any, max_bytes: int = MAX_RESULT_BYTES, field: str = "result") -> str | None:
    """Encodes a handler's result as JSON text; None for None. Invalid(field, …) if it cannot be stored."""
    return None if value is None else _exact(value, field, max_bytes).decode()


def _exact(value: Any, field: str, max_bytes: int) -> bytes:
    text = encode(value, field, max_bytes)
    try:
        received = decode_json(text)
    except msgspec.MsgspecError as error:
        raise (find_fault(value) or EncodingProblem("", _a(value), f"it cannot be read again: {error}")).error(
            field
        ) from error
    if not is_same(received, value) and (fault := find_fault(value)):
        raise fault.error(field)
    return text


def check_keys(text: bytes, field: str) -> None:
    """Raises Invalid for an object key over ``MAX_OBJECT_KEY_BYTES`` bytes in compact JSON."""
    if len(text) <= MAX_OBJECT_KEY_BYTES:
        return
    for match in _KEYS.finditer(text):
        if (
            match[2]
            and len(match[1]) > MAX_OBJECT_KEY_BYTES
            and len(key := decode_json(b'"' + match[1] + b'"').encode()) > MAX_OBJECT_KEY_BYTES
        ):
            remedy = f"a key of an object may take at most {MAX_OBJECT_KEY_BYTES:,} bytes"
            raise Invalid(field, RawText(f"a key of {len(key):,} bytes"), remedy)


def _too_deep(text: bytes, max_depth: int = MAX_NESTING) -> bool:
    if len(text) <= 2 * max_depth or text.count(b"{") + text.count(b"[") <= max_depth:
        return False  # a level takes two brackets
    brackets = _STRINGS.sub(b"", text).translate(bytes.maketrans(b"[]", b"{}"))
    brackets = re.sub(rb"[^{}]+", b"", brackets)
    for _ in range(max_depth):
        brackets = brackets.replace(b"{}", b"")  # removes one level everywhere
    return b"{" in brackets


# ── external text ─────────────────────────────────────────────────────────────────────────────────────────────────────
class _Refused(Exception):
    """Raised inside the parser's hooks: problem, remedy, and code."""

    def __init__(self, what: str, remedy: str, code: str = "invalid") -> None:
        super().__init__(what)
        self.what, self.remedy, self.code = what, remedy, code


def decode_payload(text: str | bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> dict[str, Any]:
    """Decodes a payload, like ``decode_object``."""
    return decode_object(text, max_bytes, "payload")


def decode_object(text: str | bytes, max_bytes: int, field: str, max_depth: int = MAX_NESTING) -> dict[str, Any]:
    """Decodes a JSON object: UTF-8, no duplicate keys, no silently changed value. ``max_depth``: levels."""
    data = _utf8(text, field)
    if len(data) > max_bytes:
        raise TooLarge(field, RawText(f"{len(data):,} bytes"), f"at most {max_bytes:,} bytes are stored")
    if _too_deep(data, max_depth):
        raise Invalid(
            field,
            RawText(f"a text nested deeper than {max_depth} levels"),
            f"nest at most {max_depth} levels",
            code="too_deep",
        )
    try:
        decoded = _STRICT_JSON.decode(data.decode())
    except _Refused as refused:
        raise Invalid(field, RawText(refused.what), refused.remedy, code=refused.code) from None
    except json.JSONDecodeError as error:
        remedy = f"give JSON: {error.msg} at character {error.pos}"
        raise Invalid(field, data.decode(), remedy, code="invalid_json") from None
    if not isinstance(decoded, dict):
        raise Invalid(field, decoded, "give a JSON object" + (": the arguments by name" if field == "payload" else ""))
    if b"\\u" in data and (fault := find_fault(decoded, strictness=Strictness.STRICT, max_depth=max_depth)):
        raise fault.error(field)  # only an escape brings a lone surrogate into valid UTF-8
    return decoded


def _utf8(text: str | bytes, field: str) -> bytes:
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
        data.decode()
    except UnicodeError:
        what = RawText("text that is not valid UTF-8")
        raise Invalid(field, what, "give JSON in UTF-8", code="invalid_unicode") from None
    if data.startswith(b"\xef\xbb\xbf"):
        what = RawText("text with a byte order mark")
        raise Invalid(field, what, "give JSON in UTF-8 without one", code="invalid_unicode")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Refused(f"the key {quote_value(key)} twice in one object", "give each key once", "duplicate_key")
        if len(key) * 3 > MAX_OBJECT_KEY_BYTES and len(key.encode("utf-8", "replace")) > MAX_OBJECT_KEY_BYTES:
            raise _Refused("a long key", f"a key of an object may take at most {MAX_OBJECT_KEY_BYTES:,} bytes")
        found[key] = value
    return found


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused(f"a number of {len(digits):,} digits", f"{_DIGITS_KEPT}; send text", "number_too_long")
    return int(digits)


def _decimal(digits: str) -> float:
    if math.isfinite(number := float(digits)):
        return number
    raise _Refused(
        f"the number {quote_value(digits)}", "it is out of a float's range; send text", "number_out_of_range"
    )


def _no_number(word: str) -> NoReturn:
    raise _Refused(word, "JSON has no such number; send null or text", "invalid_json")


_STRICT_JSON = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_whole, parse_float=_decimal, parse_constant=_no_number
)


# ── description of problems ───────────────────────────────────────────────────────────────────────────────────────────
def is_same(one: Any, other: Any) -> bool:
    """Returns True if two values of any origin are equal; False if comparing them fails."""
    try:
        return bool(one == other)
    except Exception:  # any __eq__ may raise; False only leads to a closer check
        return False


def _a(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _unwritable(value: Any, error: Exception) -> EncodingProblem:
    try:
        found = find_fault(value, strictness=Strictness.TYPED)
    except Exception:  # an attribute of the value raised during the search: the first error is reported
        found = None
    return found or EncodingProblem("", _a(value), f"it cannot be written as JSON ({type(error).__name__})")


def find_fault(
    value: Any, path: str = "", strictness: Strictness = Strictness.LOOSE, depth: int = 0, max_depth: int = MAX_NESTING
) -> EncodingProblem | None:
    """Returns the first part of ``value`` that JSON text cannot represent; None if there is none."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        return _fault_inside(value, path, strictness, depth + 1, max_depth)
    if strictness is Strictness.STRICT and not (value is None or isinstance(value, str | int | float)):
        remedy = "nothing says how to read it again: annotate the parameter, or pass text or a number"
        return EncodingProblem(path, _a(value), remedy)
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str | int | float):
        return _fault_of_scalar(value, path)
    fields = _fields(value) or {}
    inside = _first(find_fault(each, f"{path}.{name}", Strictness.TYPED, depth + 1) for name, each in fields.items())
    if inside or _writable(value):
        return inside
    return EncodingProblem(path, _a(value), "it cannot be written as JSON; pass plain data")


def _fault_inside(value: Any, path: str, strictness: Strictness, depth: int, max_depth: int) -> EncodingProblem | None:
    if depth > max_depth:
        return EncodingProblem(path[:max_depth], "a value that " + _DEEPER, f"nest at most {max_depth} levels")
    if isinstance(value, dict):
        return _first(
            _fault_of_key(key, path, strictness)
            or find_fault(each, path + path_step(key), strictness, depth, max_depth)
            for key, each in value.items()
        )
    if isinstance(value, set | frozenset) and strictness is not Strictness.TYPED:
        return EncodingProblem(path, _a(value), "a set has no order and comes back as an array: give a sorted list")
    return _first(
        find_fault(each, f"{path}[{index}]", strictness, depth, max_depth) for index, each in enumerate(value)
    )


def _fault_of_key(key: Any, path: str, strictness: Strictness) -> EncodingProblem | None:
    if isinstance(key, str):
        return _fault_of_scalar(key, path + path_step(key))
    if strictness is Strictness.TYPED and _writable({key: None}):
        return _fault_of_scalar(key, path + path_step(key)) if isinstance(key, float) else None
    return EncodingProblem(path, f"a key of type {type(key).__name__}", "the keys of a JSON object are text")


def _fault_of_scalar(value: str | float, path: str) -> EncodingProblem | None:
    if isinstance(value, str):
        if value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value):
            return None
        remedy = "it holds a lone surrogate, which UTF-8 cannot carry"
        return EncodingProblem(path, "a text", remedy, "invalid_unicode")  # unquoted: it may be stored as an error
    if isinstance(value, int):
        if _LOWEST <= value <= _HIGHEST:
            return None
        return EncodingProblem(path, "a huge integer", f"{_DIGITS_KEPT}; pass text")
    return (
        None
        if math.isfinite(value)
        else EncodingProblem(path, str(value), "JSON has no such number; pass None or text")
    )


def _writable(value: Any) -> bool:
    try:
        write(value)
    except Exception:  # any class may raise anything: it cannot be written
        return False
    return True


def _first(faults: Iterator[EncodingProblem | None]) -> EncodingProblem | None:
    return next((fault for fault in faults if fault), None)


def _fields(value: Any) -> dict[str, Any] | None:
    kind = type(value)
    for source in ("__struct_fields__", "__dataclass_fields__"):
        if (names := getattr(kind, source, None)) is not None:
            return {name: getattr(value, name, None) for name in names}
    if (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        return {each.name: getattr(value, each.name, None) for each in attributes}
    return dict(vars(value)) if is_model(kind) else None


def path_step(key: object) -> str:
    """Returns one step of a path: ``.name``, or ``['any text']`` for keys that are no names."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() and len(key) < 64 else f"[{quote_value(key)}]"


def find_difference(sent: Any, received: Any, path: str = "", depth: int = 0) -> EncodingProblem | None:
    """Returns the first part that a handler would receive with another value; None if only forms differ.

    Such forms are a list for a tuple, and any type that an annotation makes of plain JSON values.
    """
    if is_same(sent, received):
        return None
    if depth > MAX_NESTING:
        return EncodingProblem(path, "a value that " + _DEEPER, f"nest at most {MAX_NESTING} levels")
    if isinstance(sent, dict) and isinstance(received, dict):
        missing = _first(_fault_of_key(key, path, Strictness.STRICT) for key in sent if key not in received)
        common = (key for key in sent if key in received)
        return missing or _first(
            find_difference(sent[key], received[key], path + path_step(key), depth + 1) for key in common
        )
    if isinstance(sent, list | tuple) and isinstance(received, list | tuple) and len(sent) == len(received):
        pairs = enumerate(zip(sent, received, strict=True))
        return _first(find_difference(one, other, f"{path}[{index}]", depth + 1) for index, (one, other) in pairs)
    if type(sent) is type(received):
        return _difference_of_like(sent, received, path, depth)
    return _difference_of_unlike(sent, received, path)


def _difference_of_like(sent: Any, received: Any, path: str, depth: int) -> EncodingProblem | None:
    fields, others = _fields(sent), _fields(received)
    if fields is not None and others is not None:
        return _first(find_difference(fields[name], others.get(name), f"{path}.{name}", depth + 1) for name in fields)
    if type(sent).__eq__ is _BY_IDENTITY:
        return None  # compares by identity, so a difference means nothing
    return find_fault(sent, path, Strictness.TYPED) or EncodingProblem(
        path, _a(sent), "it comes back with another value"
    )


def _difference_of_unlike(sent: Any, received: Any, path: str) -> EncodingProblem | None:
    if fault := find_fault(sent, path, Strictness.STRICT):
        return fault
    if isinstance(sent, int | float) and isinstance(received, int | float):
        return EncodingProblem(
            path, quote_value(sent), f"it would arrive as {quote_value(received)}: give the annotated type"
        )
    return None


_decoders: weakref.WeakKeyDictionary[Any, Callable[[str], Any]] = weakref.WeakKeyDictionary()


def decoder_of(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Returns the decoder of a function's results, by its return annotation; made once."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = getattr(type(function), "__call__", function)  # noqa: B004 - of an object, its method
    try:
        decoder = _decoders.get(function)
        if decoder is None:
            decoder = _decoders[function] = result_decoder(function)
    except TypeError:  # no weak reference
        decoder = result_decoder(function)
    return decoder
