"""Setting: one row of the table of settings, a class attribute of ``Settings``."""

from __future__ import annotations

from typing import Generic, TypeVar, overload

from holdfast.settings.types import Kind

T = TypeVar("T")

PREFIX = "HOLDFAST_"


class Setting(Generic[T]):
    """A row of the table; on a ``Settings`` it is the value."""

    name: str
    default: T

    def __init__(self, kind: Kind[T], default: object, doc: str) -> None:
        self.kind = kind
        self.doc = doc
        self._written_default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.default = self.kind.parse(name, self._written_default)

    @overload
    def __get__(self, settings: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, settings: object, owner: type) -> T: ...
    def __get__(self, settings: object | None, owner: type) -> Setting[T] | T:
        return self  # to the class; a Settings has its values in its own dictionary, which is looked at first

    @property
    def variable(self) -> str:
        """The environment variable that says it."""
        return PREFIX + self.name.upper()
