"""The application of a worker: its own handlers, and those of every module that HANDLER_MODULES names."""

from __future__ import annotations

from importlib import import_module

from atlasqueue import config
from atlasqueue.app import app
from atlasqueue.worker import handlers
from holdfast import ConfigError

__all__ = ["app", "handlers"]


def _load(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and misses another one
        raise ConfigError(
            f"{config.HANDLER_MODULES}: there is no module {error.name}; start the worker in the directory that holds "
            "it, or correct the name"
        ) from None


for _name in config.handler_modules():
    _load(_name)
