"""Signatures of task functions, and the payloads that fit them.

The parameters become one msgspec decoder, so decoding, validation and defaults of a payload are one pass in C.
Annotations are resolved at first use, not at registration: by then forward references have a target. The details of
an error are determined only after the decoder has failed.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import msgspec.inspect

from holdfast.core.errors import ConfigError, Invalid, TooLarge
from holdfast.core.validation import peer_option_hint
from holdfast.tasks.codec import (
    MAX_PAYLOAD_BYTES,
    EncodingProblem,
    RawText,
    Strictness,
    check_keys,
    encode,
    find_difference,
    find_fault,
    is_model,
    make_decoder,
    path_step,
)
from holdfast.tasks.context import Context

_OPTIONS = frozenset(
    {"delay", "run_at", "priority", "queue", "key", "unique", "max_attempts", "timeout", "retry", "tags", "metadata"}
    | {"key_for", "expires", "after", "batch", "id", "connection"}
)
"""Names that are probably meant as options of the job if the task has no parameter of that name."""
_asdict = msgspec.structs.asdict
_raw_parts = make_decoder(dict[str, msgspec.Raw])
_anything = make_decoder(Any)
_ABSENT = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_PLACE = re.compile(r"(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?", re.DOTALL)

_KINDS = inspect.Parameter
_BY_POSITION = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)


class _Provided:
    """Default of a parameter that the worker provides."""

    def __repr__(self) -> str:
        return "provided()"


_PROVIDED = _Provided()


def provided() -> Any:
    """Marks a parameter as a dependency: not part of the payload; the worker passes it, by its annotated class.

    ``async def send(to: str, http: Client = provided())``.
    """
    return _PROVIDED


def check_function(task: str, function: object) -> None:
    """Raises ConfigError, at registration, for an object that cannot be called with a payload."""
    problem = _problem(function)
    if problem:
        raise ConfigError(f"task {task!r}: {problem}")


def _problem(function: object) -> str | None:
    if not inspect.isfunction(function):
        kind = type(function).__name__
        remedy = "decorate a plain function (def or async def)"
        if inspect.ismethod(function):
            remedy += "; a Celery task with bind=True: write it without self, whose place a Context takes"
        return f"a task is a function, not a {kind}; {remedy}"
    where = source_location(function)
    if function.__name__ == "<lambda>":
        return f"{where} is a lambda; give it a name with def"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return f"{where} is a generator; a handler returns its result: use return instead of yield"
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        remedy = "decorate a plain function; where self was Celery's, write context: Context"
        return f"{where} takes {parameters[0].name!r}: a method has no object in a worker; {remedy}"
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL:
            return f"{where} takes *{each.name}; a payload has names: use a list parameter, or **{each.name}"
        if each.name.startswith("__"):
            return f"{where}: a parameter named {each.name!r} cannot be a key of a payload; rename it"
    return None


def source_location(function: Callable[..., Any]) -> str:
    """Returns a function's location: ``module.qualname (file:line)``."""
    code = inspect.unwrap(function).__code__
    return f"{function.__module__}.{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


class Argument(str):
    """Name of an argument in error messages. ``place``: its path in the submission, for programs."""

    __slots__ = ("place",)
    place: str

    def __new__(cls, words: str, place: str = "") -> Self:  # without: what pickle and copy make first
        made = super().__new__(cls, words)
        made.place = place
        return made


class Signature:
    """Parameters of a task's function, and their decoder. Made once per task, at first use."""

    __slots__ = (
        "task",
        "needs_context",
        "dependencies",
        "names",
        "required",
        "bind",
        "entry",
        "_reserved",
        "_positional",
        "_open",
        "_decode",
        "_decode_rest",
    )

    def __init__(self, task: str, function: Callable[..., Any]) -> None:
        self.task = task
        parameters = list(inspect.signature(function).parameters.values())
        hints = {each.name: _resolve(task, function, each) for each in parameters}
        self.needs_context = bool(parameters) and _is_context(hints[parameters[0].name])
        leading, parameters = parameters[: self.needs_context], parameters[self.needs_context :]
        self.dependencies: dict[str, type] = {
            each.name: _dependency(task, each, hints[each.name]) for each in parameters if each.default is _PROVIDED
        }
        self._reserved = {*self.dependencies, *(each.name for each in leading)}
        self._positional = [each.name for each in parameters if each.kind in _BY_POSITION]
        rest = [each for each in parameters if each.kind is each.VAR_KEYWORD]
        payload_parameters = [each for each in parameters if each.name not in self.dependencies and each not in rest]
        self.names = [each.name for each in payload_parameters]
        self.required = [each.name for each in payload_parameters if each.default is each.empty]
        for each in payload_parameters + rest:
            _check_annotation(task, each, hints[each.name])
        self._decode = make_decoder(_payload_struct(task, payload_parameters, hints, closed=not rest))
        self._open = bool(rest)
        self._decode_rest = make_decoder(hints[rest[0].name]) if rest else _anything
        self.bind = self._bind_open if rest else self._bind_closed
        """Decodes a payload to keyword arguments. Invalid names the argument that does not fit, and the cause."""
        self.entry = _entry(function, [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY])
        """Callable that takes the context, if the function needs one, and all other arguments by name."""

    # ── payload → arguments ───────────────────────────────────────────────────────────────────────────────────
    def _bind_closed(self, payload: str | bytes) -> dict[str, Any]:
        try:
            return _asdict(self._decode(payload))
        except Exception as error:  # msgspec's, or whatever a model's own validators raise
            raise self._misfit(payload, error) from _foreign_cause(error)

    def _bind_open(self, payload: str | bytes) -> dict[str, Any]:
        name = ""
        try:
            arguments = _asdict(self._decode(payload))
            for name, raw in _raw_parts(payload).items():
                if name not in arguments:
                    arguments[name] = self._decode_rest(raw)
        except Exception as error:
            raise self._misfit(payload, error, name) from _foreign_cause(error)
        if taken := self._reserved & arguments.keys():
            raise self._provided_given(min(taken))
        return arguments

    def _misfit(self, payload: str | bytes, error: Exception, rest: str = "") -> Invalid:
        try:
            given = _anything(payload)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return Invalid("payload", RawText(f"the payload of task {self.task!r}"), "it is not JSON that can be read")
        if not isinstance(given, dict):
            return Invalid("payload", given, "a payload is a JSON object: the arguments by name")
        unknown = [] if self._open else [name for name in given if name not in self.names]
        if unknown:
            return self._unknown(unknown[0], given)
        if missing := [name for name in self.required if name not in given]:
            return _missing(self.field_name(missing[0]))
        return self._wrong_value(given, error, rest)

    def _wrong_value(self, given: dict[str, Any], error: Exception, rest: str) -> Invalid:
        found = _PLACE.fullmatch(str(error))
        what, path = (found["what"], found["path"] or "$") if found else (str(error), "$")
        name = rest or re.split(r"[.\[]", path[2:])[0]
        if name not in given:
            return Invalid("payload", given, f"task {self.task!r} cannot read it: {what}")
        inside = path[1:] if rest else path[2 + len(name) :]
        if absent := _ABSENT.fullmatch(what):
            return _missing(self.field_name(name, inside + path_step(absent[1])))
        return Invalid(self.field_name(name, inside), _at(given[name], inside), what[:1].lower() + what[1:])

    def _unknown(self, name: str, given: Mapping[str, Any]) -> Invalid:
        if name in self._reserved:
            return self._provided_given(name)
        near = difflib.get_close_matches(name, self.names, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        takes = f"it takes {', '.join(self.names)}" if self.names else "it takes no arguments"
        if name in _OPTIONS and not near:
            takes += f"; options of a job are separate from its arguments: .options({name}=…).enqueue(…)"
        takes += "" if near else peer_option_hint(name)
        return Invalid(self.field_name(name), given[name], f"there is no such parameter; {hint}{takes}")

    def _provided_given(self, name: str) -> Invalid:
        return Invalid(self.field_name(name), RawText("a value"), "the worker provides it; leave it out")

    def field_name(self, name: str, inside: str = "") -> Argument:
        """Returns the name, in errors, of an argument or of a path inside it (``.a[0]``)."""
        shown_name = name if name.isidentifier() and len(name) < 64 else path_step(name)
        return Argument(f"argument '{shown_name}{inside}' of task '{self.task}'", f"payload{path_step(name)}{inside}")

    def _refused(self, name: str, fault: EncodingProblem) -> Invalid:
        return fault._replace(path="").error(self.field_name(name, fault.path))

    # ── arguments → payload ───────────────────────────────────────────────────────────────────────────────────
    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any], max_bytes: int = MAX_PAYLOAD_BYTES) -> str:
        """Encodes a call as a payload. Raises Invalid if a worker would receive other values."""
        given = self._by_name(args, kwargs) if args else kwargs
        try:
            text = encode(given, "payload", max_bytes)
            received = self.bind(text)
        except Invalid as error:
            if fault := self._fault(given, error):
                raise fault from None
            raise
        if self._open:
            check_keys(text, f"payload of task '{self.task}'")
        if not _subset(given, received):
            self._compare(given, received)
        return text.decode()

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._positional):
            takes = f"task '{self.task}' takes at most {len(self._positional)} by position"
            raise Invalid("arguments", RawText(f"a call with {len(args)} positional arguments"), takes)
        given = dict(zip(self._positional, args, strict=False))
        if kwargs:
            for name in given.keys() & kwargs.keys():
                raise Invalid(self.field_name(name), RawText("a value by position and one by name"), "give one of them")
            given.update(kwargs)
        return given

    def _fault(self, given: Mapping[str, Any], error: Invalid) -> Invalid | None:
        """Returns a more precise error than ``error``: for the first argument that no payload can represent."""
        if isinstance(error, TooLarge):
            return None
        for name, value in given.items():
            if name in self._reserved or not (self._open or name in self.names):
                return self._unknown(name, given)
            if fault := _guarded(find_fault, value, "", Strictness.TYPED):
                return self._refused(name, fault)
        return None

    def _compare(self, given: Mapping[str, Any], received: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if fault := _guarded(find_difference, value, received[name]):
                raise self._refused(name, fault)


def _missing(field: str) -> Invalid:
    return Invalid(field, RawText("a value"), "give one: it has no default", problem="is missing")


def _at(value: Any, inside: str) -> Any:
    """Returns the value at a path inside a payload's value; the enclosing value if the path is not exact."""
    for name, index in _STEP.findall(inside):
        try:
            value = value[int(index)] if index else value[name]
        except (KeyError, IndexError, TypeError):
            return value
    return value


def _guarded(look: Callable[..., EncodingProblem | None], *values: Any) -> EncodingProblem | None:
    """Runs ``look``, which reads attributes of the user's objects: any exception becomes a problem."""
    try:
        return look(*values)
    except Exception as error:
        return EncodingProblem(
            "", f"a value of type {type(values[0]).__name__}", f"looking at it raised {type(error).__name__}"
        )


def _subset(given: Mapping[str, Any], received: Mapping[str, Any]) -> bool:
    try:
        return given == received or given.items() <= received.items()
    except Exception:  # a foreign __eq__: then every argument is looked at by itself
        return False


# ── annotations ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _resolve(task: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    scope = inspect.unwrap(function).__globals__
    try:
        return typing.get_type_hints(holder, globalns=scope, include_extras=True)[parameter.name]
    except Exception as error:  # evaluating an annotation runs the user's expression
        raise ConfigError(
            f"task {task!r}: the annotation {parameter.annotation!r} of parameter {parameter.name!r} of "
            f"{source_location(function)} cannot be resolved ({error}); import the name at the top of its module"
        ) from None


def _foreign_cause(error: Exception) -> Exception | None:
    """Returns the error if it is of the user's code, as the cause to show; None for one of our decoder."""
    return None if isinstance(error, msgspec.MsgspecError) else error


def _is_context(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Context)


def _dependency(task: str, parameter: inspect.Parameter, hint: Any) -> type:
    if isinstance(hint, type) and parameter.annotation is not parameter.empty:
        return hint
    raise ConfigError(
        f"task {task!r}: parameter {parameter.name!r} is provided() and so needs a class as its annotation: "
        "the worker finds the value by it"
    )


def _check_annotation(task: str, parameter: inspect.Parameter, hint: Any) -> None:
    where = f"task {task!r}: parameter {parameter.name!r}"
    if _is_context(hint):
        raise ConfigError(f"{where} is annotated Context; the context is always the first parameter")
    try:
        make_decoder(hint)
        foreign = next(_foreign(msgspec.inspect.type_info(hint), set()), None)
    except Exception as error:  # msgspec says what it cannot do in several types of its own
        raise ConfigError(f"{where}: a payload cannot carry {_name(hint)}: {error}") from None
    if foreign is not None:
        raise ConfigError(
            f"{where}: a payload cannot carry {_name(foreign)}; use plain data (dataclass, TypedDict, pydantic model, "
            "datetime, UUID …), or mark it as a dependency: = provided()"
        )


def check_result_annotation(task: str, function: Callable[..., Any]) -> None:
    """Raises ConfigError, at registration, for a return annotation whose values cannot be stored.

    An annotation that cannot be resolved yet, or is ambiguous, is checked with each result.
    """
    annotation = getattr(inspect.unwrap(function), "__annotations__", {}).get("return")
    holder = SimpleNamespace(__annotations__={"return": annotation})
    try:
        hint = typing.get_type_hints(holder, globalns=inspect.unwrap(function).__globals__, include_extras=True)[
            "return"
        ]
        info = msgspec.inspect.type_info(hint)
    except Exception:  # evaluating an annotation runs the user's expression
        return
    if problem := next(_unkept(info, set()), None):
        raise ConfigError(
            f"task {task!r}: a result of type {_name(hint)}, as {source_location(function)} returns, cannot be kept: "
            f"{problem}"
        )


def _unkept(info: Any, seen: set[int]) -> Iterator[str]:
    """Yields the reasons why results of an annotation are refused; see ``encode_result``."""
    if id(info) in seen:
        return
    seen.add(id(info))
    match info:
        case msgspec.inspect.SetType() | msgspec.inspect.FrozenSetType():
            yield "a set has no order and comes back as an array; return a sorted list"
        case msgspec.inspect.DictType(key_type=msgspec.inspect.IntType() | msgspec.inspect.FloatType()):
            yield "the keys of a JSON object are text; return keys of type str"
        case msgspec.inspect.DictType():
            yield from _unkept(info.value_type, seen)
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            yield from _unkept(info.item_type, seen)
        case msgspec.inspect.TupleType(item_types=items) | msgspec.inspect.UnionType(types=items):
            for each in items:
                yield from _unkept(each, seen)
        case msgspec.inspect.Metadata():
            yield from _unkept(info.type, seen)


def _name(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else str(hint)


def _foreign(info: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the classes inside an annotation that neither msgspec nor pydantic can convert to JSON and back."""
    if id(info) in seen:
        return
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType) and not (is_model(info.cls) or info.cls is object):
        yield info.cls
    elif isinstance(info, tuple | list):
        for each in info:
            yield from _foreign(each, seen)
    elif isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        for name in info.__struct_fields__:
            yield from _foreign(getattr(info, name), seen)


def _payload_struct(
    task: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any], *, closed: bool
) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for each in parameters:
        hint = hints[each.name]
        fields.append((each.name, hint) if each.default is each.empty else (each.name, hint, _default(each.default)))
    return msgspec.defstruct(f"payload of {task}", fields, kw_only=True, forbid_unknown_fields=closed, gc=False)


def _default(value: Any) -> Any:
    """Returns the function's default object, in the form of a struct's default."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    return msgspec.field(default_factory=lambda: value)


def _entry(function: Callable[..., Any], positional_only: Sequence[str]) -> Callable[..., Any]:
    if not positional_only:
        return function

    def call_by_name(*context: Any, **arguments: Any) -> Any:
        return function(*context, *(arguments.pop(name) for name in positional_only), **arguments)

    return call_by_name
