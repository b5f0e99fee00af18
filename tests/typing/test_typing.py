"""What a type checker makes of ``enqueue``: the task's own parameters, without its Context, and what it returns."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLS = Path(__file__).with_name("calls.py")

_SAID = re.compile(r"calls\.py:(\d+): (error|note): (.*?)(?:  \[([a-z-]+)\])?$")
_LONG = re.compile(r"\b(?:builtins|holdfast(?:\.\w+)+)\.(?=\w)")


def _checked(cache: Path) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """By line: the types that were revealed, and the codes of the errors."""
    words = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(cache), "--no-error-summary", str(CALLS)]
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", *words], capture_output=True, text=True, check=False, cwd=ROOT, timeout=55
    )
    shown, wrong = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for line in ended.stdout.splitlines():
        match = _SAID.search(line)
        if match is None:
            continue
        number, kind, text, code = match.groups()
        if kind == "error":
            wrong[int(number)].append(code)
        elif text.startswith("Revealed type is "):
            shown[int(number)].append(_LONG.sub("", text.split('"')[1]))
    assert ended.stderr == ""
    return shown, wrong


def _expected(mark: str) -> dict[int, list[str]]:
    lines = enumerate(CALLS.read_text(encoding="utf-8").splitlines(), 1)
    return {number: line.partition(f"# {mark}: ")[2].split(", ") for number, line in lines if f"  # {mark}: " in line}


def test_good_calls_are_typed_and_bad_ones_refused(tmp_path: Path) -> None:
    shown, wrong = _checked(tmp_path)
    assert shown == _expected("shows")
    assert {line: sorted(codes) for line, codes in wrong.items()} == _expected("wrong")
    assert (len(shown), len(wrong)) >= (12, 12)
