"""What is counted in one source file. The jobs call this, and so does the direct computation they are compared with."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from pathlib import Path

# Old files have old-fashioned string escapes; that is not what is measured. For the whole process: threads share it.
warnings.simplefilter("ignore", SyntaxWarning)
warnings.simplefilter("ignore", DeprecationWarning)


@dataclass(frozen=True)
class Measure:
    """The figures of one file."""

    bytes: int
    lines: int
    functions: int
    classes: int
    longest_name: str  # of the longest function; empty where there is none
    longest_lines: int


def measure(path: str) -> Measure:
    """Read, parse and measure a file; SyntaxError or ValueError where it is no Python."""
    source = Path(path).read_bytes()
    functions = classes = longest_lines = 0
    longest_name = ""
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions += 1
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > longest_lines:
                longest_name, longest_lines = node.name, length
        elif isinstance(node, ast.ClassDef):
            classes += 1
    return Measure(len(source), len(source.splitlines()), functions, classes, longest_name, longest_lines)


@dataclass
class Totals:
    """The figures of many files."""

    measured: int = 0
    unparsable: int = 0
    bytes: int = 0
    lines: int = 0
    functions: int = 0
    classes: int = 0
    longest_lines: int = 0

    def add(self, one: Measure) -> None:
        """Count one file in."""
        self.measured += 1
        self.bytes += one.bytes
        self.lines += one.lines
        self.functions += one.functions
        self.classes += one.classes
        self.longest_lines = max(self.longest_lines, one.longest_lines)


def measure_all(paths: list[Path]) -> Totals:
    """The totals of these files, without any queue."""
    totals = Totals()
    for path in paths:
        try:
            totals.add(measure(str(path)))
        except (SyntaxError, ValueError):
            totals.unparsable += 1
    return totals
