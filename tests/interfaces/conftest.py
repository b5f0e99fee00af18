"""Fixtures of the faces."""

from tests.interfaces.cli import cli

__all__ = ["cli"]
