"""Resource limits of one job: as a task or command declares them, and as the settings cap them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec

from holdfast.core.errors import Invalid
from holdfast.core.validation import did_you_mean, format_duration, format_size, parse_count, parse_duration, parse_size

MIN_MEMORY = 16 << 20
"""Smallest memory limit in bytes; a Python interpreter needs 10 MiB."""
MAX_MEMORY = 1 << 50
MIN_CPU = timedelta(milliseconds=100)
MIN_OPEN_FILES = 16
"""Descriptors that a child process needs for itself."""
MAX_COUNT = 1_000_000

_SHORT_SIZE = re.compile(r"\s*\d{1,18}\s*[KMG]\s*", re.IGNORECASE)


class ResourceLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits in plain numbers; None: no limit."""

    memory: int | None = None  # bytes of resident memory, of all processes of the job
    cpu: float | None = None  # seconds of CPU time, of all processes of the job
    open_files: int | None = None  # descriptors of one process
    file_size: int | None = None  # bytes of one file
    processes: int | None = None  # processes of the job at once

    @property
    def is_set(self) -> bool:
        """Returns True if there is any limit."""
        return self != UNLIMITED

    def restricted_to(self, maxima: ResourceLimits) -> ResourceLimits:
        """Returns the stricter limit of each resource."""
        both = zip(_values(self), _values(maxima), strict=True)
        return msgspec.convert([_lower(own, most) for own, most in both], ResourceLimits)

    def check_within(self, maxima: ResourceLimits, field: str) -> None:
        """Raises Invalid where a limit is above the largest one that the settings allow."""
        for name, own, most in zip(FIELDS, _values(self), _values(maxima), strict=True):
            if own is not None and most is not None and own > most:
                remedy = f"give at most {describe_amount(name, most)}, or raise the setting job_{name}"
                raise Invalid(f"{field}.{name}", describe_amount(name, own), remedy, "is above what the settings allow")


FIELDS = ResourceLimits.__struct_fields__
UNLIMITED = ResourceLimits()


class Resources(msgspec.Struct, frozen=True):
    """Limits of a task's jobs: ``@app.task(executor="process", resources=Resources(memory="512M", cpu=60))``.

    memory: bytes, or text like "512M" or "2GiB", of all processes of the job. cpu: seconds of CPU time, a timedelta or
    text like "5m". open_files: descriptors of one process. file_size: bytes of one file. processes: how many at once.
    """

    memory: int | str | None = None
    cpu: float | timedelta | str | None = None
    open_files: int | None = None
    file_size: int | str | None = None
    processes: int | None = None

    def __post_init__(self) -> None:
        self.to_limits()

    def to_limits(self, field: str = "resources") -> ResourceLimits:
        """The limits in numbers; Invalid names the one that is wrong."""
        return ResourceLimits(
            memory=_memory(self.memory, f"{field}.memory"),
            cpu=_cpu(self.cpu, f"{field}.cpu"),
            open_files=_count(self.open_files, f"{field}.open_files", MIN_OPEN_FILES),
            file_size=None if self.file_size is None else _size(self.file_size, f"{field}.file_size"),
            processes=_count(self.processes, f"{field}.processes", 1),
        )


def as_resources(value: object, field: str = "resources") -> Resources:
    """Returns resources given by code or as JSON; Invalid for anything else."""
    if isinstance(value, Resources):
        return value
    if not isinstance(value, Mapping):
        raise Invalid(field, value, f'give an object of {", ".join(FIELDS)}, such as {{"memory": "512MiB"}}')
    for name in value:
        if name not in FIELDS:
            raise Invalid(f"{field}.{name}", value[name], f"there are {', '.join(FIELDS)}{did_you_mean(name, FIELDS)}")
    return Resources(**value)


def resource_document(value: Resources | Mapping[str, Any]) -> dict[str, Any]:
    """Returns resources in the form of a command's payload; Invalid like ``as_resources``."""
    limits = as_resources(value).to_limits()
    return {name: amount for name, amount in zip(FIELDS, _values(limits), strict=True) if amount is not None}


def describe_amount(name: str, amount: float) -> str:
    """An amount of a resource with its unit, for a message."""
    if name == "cpu":
        return format_duration(timedelta(seconds=round(amount, 2)))
    if name in ("memory", "file_size"):
        size, mebibyte = int(amount), 1 << 20
        return format_size(size) if size < mebibyte or size % mebibyte == 0 else f"{size / mebibyte:.1f}MiB"
    return str(int(amount))


def _values(limits: ResourceLimits) -> tuple[float | None, ...]:
    return limits.memory, limits.cpu, limits.open_files, limits.file_size, limits.processes


def _lower(own: float | None, most: float | None) -> float | None:
    return most if own is None else own if most is None else min(own, most)


def _memory(value: object, field: str) -> int | None:
    if value is None:
        return None
    size = _size(value, field)
    if size < MIN_MEMORY:
        raise Invalid(field, value, f"give at least {format_size(MIN_MEMORY)}: a bare Python takes 10MiB")
    return size


def _size(value: object, field: str) -> int:
    text = f"{value.strip()}iB" if isinstance(value, str) and _SHORT_SIZE.fullmatch(value) else value
    try:
        size = parse_size(text, field)
    except Invalid:
        raise Invalid(field, value, 'write a number of bytes, or a size such as "512M" or "2GiB"') from None
    if size > MAX_MEMORY:
        raise Invalid(field, value, f"give at most {format_size(MAX_MEMORY)}; leave it out for no limit")
    return size


def _cpu(value: object, field: str) -> float | None:
    if value is None:
        return None
    span = parse_duration(value, field)
    if span < MIN_CPU:
        raise Invalid(field, value, f"give at least {format_duration(MIN_CPU)}; leave it out for no limit")
    return span.total_seconds()


def _count(value: object, field: str, least: int) -> int | None:
    return None if value is None else parse_count(value, field, least=least, most=MAX_COUNT)
