"""Loads an application from ``module:attribute``, with a specific message for each failure."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from holdfast import Holdfast
from holdfast.app.bound_task import BoundTask
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.validation import did_you_mean

_PACKAGE = str(Path(__file__).resolve().parents[1])


def load_application(target: str, source: str = "argument") -> Holdfast:
    """Imports the target. ConfigError names the problem; its traceback shows frames of the user's code only."""
    module_name, _, attribute = target.partition(":")
    module = _import(module_name, f"app {target} ({source})")
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"app {target} ({source}): {module_name} has no {attribute}{_offer(module, attribute)}")
        found = getattr(found, part)
    if isinstance(found, BoundTask):
        raise ConfigError(f"app {target} ({source}): {target} is a task; name the application{_offered(module)}")
    if not isinstance(found, Holdfast):
        kind = type(found).__name__
        raise ConfigError(f"app {target} ({source}): this is of type {kind}, not Holdfast{_offer(module, attribute)}")
    return found


@contextmanager
def startup_explained() -> Iterator[None]:
    """Wraps the start of a worker: ConfigError if a lifespan or provider of the application fails."""
    from holdfast.worker.invocation import HandlerInvoker

    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        within = error.__traceback__
        while within is not None and within.tb_frame.f_code is not HandlerInvoker.open.__code__:
            within = within.tb_next
        if within is None:
            raise
        raise ConfigError(_failed("starting the application", error.with_traceback(within.tb_next))) from None


def _import(name: str, what: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{what}: there is no module {error.name}; looked in {here} and on Python's path: {_correction(name)}"
            ) from None
        raise ConfigError(_failed(f"{what}: importing it", error)) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(_failed(f"{what}: importing it", error)) from None


def _correction(name: str) -> str:
    if name.endswith(".py"):
        return f"leave out .py: {name.removesuffix('.py').replace('/', '.')}"
    return "change to the directory that holds it, or correct the name"


def _offer(module: ModuleType, attribute: str) -> str:
    names = _applications(module)
    if not names:
        return f"; write `{attribute.split('.', maxsplit=1)[0]} = Holdfast()` there"
    return did_you_mean(attribute, names) or f"; it has {', '.join(names)}"


def _offered(module: ModuleType) -> str:
    names = _applications(module)
    return f": {' or '.join(f'{module.__name__}:{name}' for name in names)}" if names else ""


def _applications(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Holdfast)]


def _failed(what: str, error: BaseException) -> str:
    """Returns a line that names the error, then the traceback of the user's code."""
    trace = traceback.TracebackException.from_exception(error)
    _keep_user_frames(trace)
    summary = "".join(trace.format_exception_only()).strip().splitlines()[-1]
    return f"{what} failed: {summary}\n{''.join(trace.format()).rstrip()}"


def _keep_user_frames(trace: traceback.TracebackException) -> None:
    user_frames = [frame for frame in trace.stack if not _is_machinery(frame.filename)]
    trace.stack = traceback.StackSummary.from_list(user_frames)
    for linked in (trace.__cause__, trace.__context__):
        if linked is not None:
            _keep_user_frames(linked)


def _is_machinery(filename: str) -> bool:
    if filename.startswith("<frozen "):
        return True
    return filename.startswith(_PACKAGE + os.sep) or filename in (importlib.__file__, contextlib.__file__)
