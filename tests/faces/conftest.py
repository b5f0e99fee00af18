"""Fixtures of the faces."""

from tests.faces.cli import cli

__all__ = ["cli"]
