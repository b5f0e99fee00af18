"""Types of a sample application, as mypy and pyright see them: tasks, handles, and the blocking view."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from holdfast import Holdfast, JobHandle
from holdfast.app.application import BlockingHoldfast
from holdfast.app.handle import BlockingHandle

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


def _checked_by_pyright(folder: Path) -> tuple[dict[int, list[str]], set[int]]:
    """By line: the types that were revealed; and the lines with errors."""
    settings = {
        "include": [str(CALLS)],
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "strict",
    }
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps(settings), encoding="utf-8")
    words = ["--project", str(config), "--pythonpath", sys.executable, "--outputjson"]
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("basedpyright")), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=200,
    )
    shown, wrong = defaultdict[int, list[str]](list), set[int]()
    for each in json.loads(ended.stdout)["generalDiagnostics"]:
        line = each["range"]["start"]["line"] + 1
        if each["severity"] == "error":
            wrong.add(line)
        elif each["message"].startswith("Type of "):
            shown[line].append(each["message"].rsplit(' is "', 1)[1].removesuffix('"'))
    return shown, wrong


def test_pyright_sees_the_same_types_and_the_same_mistakes(tmp_path: Path) -> None:
    shown, wrong = _checked_by_pyright(tmp_path)
    assert shown == _expected("shows")
    assert wrong == set(_expected("wrong"))


def test_every_async_method_has_a_blocking_twin() -> None:
    """With the same parameters; the view of a handle says its result's type itself. A worker needs an event loop."""
    iterators = {"stream_tag"}
    for kind, view in ((Holdfast, BlockingHoldfast), (JobHandle, BlockingHandle)):
        members = inspect.getmembers(kind)
        methods = {name: inspect.unwrap(method) for name, method in members if not name.startswith("_")}
        in_loop = {"open_store", "run_worker"}
        twins = {name for name, method in methods.items() if inspect.iscoroutinefunction(method)} - in_loop
        assert {name for name in vars(view) if not name.startswith("_")} - iterators == twins
