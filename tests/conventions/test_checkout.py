"""The checkout keeps the rules of the project. A failure names the file, the line and the rule."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

from tests.conventions import rules

ROOT = Path(__file__).resolve().parents[2]
STORES = ROOT / "holdfast" / "stores"
PUBLIC_NAMES = Path(__file__).with_name("public_names.txt")

_CODE = ("holdfast", "tests", "examples", "benchmarks")
_TEXT = (
    "*.md",
    "*.toml",
    "*.sql",
    "*.lua",
    "*.sh",
    "*.yml",
    "*.yaml",
    "*.json",
    "*.txt",
    "*.py",
    "Makefile",
    ".ci/run",
)
_CRASH = "mark." + "crash"
_NOT_OURS = frozenset({".git", ".venv", "__pycache__", "build", "dist", "node_modules", "results"})


@cache
def _ours() -> list[Path]:
    """Every file of the checkout that is not made. Looked for once: an environment beside holds many thousands."""
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if name not in _NOT_OURS and not name.endswith("_cache"))
        found += [Path(folder, name) for name in sorted(names)]
    return found


def _files(*patterns: str, under: Path = ROOT) -> Iterator[Path]:
    for path in _ours():
        if path.is_relative_to(under) and any(path.match(pattern) for pattern in patterns):
            yield path


def _python() -> Iterator[Path]:
    for room in _CODE:
        yield from _files("*.py", under=ROOT / room)


def _hold(paths: Iterable[Path], rule: Callable[[str], list[str]]) -> None:
    """Fail with everything the rule has to say about these files, one complaint a line."""
    complaints = [f"{path.relative_to(ROOT)}: {problem}" for path in paths for problem in rule(_text(path))]
    assert not complaints, "\n".join(["", *complaints])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_functions_and_files_stay_short() -> None:
    _hold(_python(), rules.too_long)


def test_every_public_name_says_what_it_means() -> None:
    package = list(_files("*.py", under=ROOT / "holdfast"))
    promises = {name for path in package for name in rules.promised(_text(path))}
    _hold(package, lambda source: rules.undocumented(source, promises))


def test_nothing_runs_data_as_code_or_hides_unfinished_work() -> None:
    _hold(_python(), rules.banned)


def test_no_file_of_any_kind_is_unfinished() -> None:
    _hold((path for path in _files(*_TEXT) if path.suffix != ".py"), rules.unfinished)


def test_published_text_names_no_machine_index_or_key() -> None:
    _hold(_files(*_TEXT), rules.forbidden_text)


def test_import_contracts_hold() -> None:
    """The floors of the house, in pyproject.toml under tool.importlinter."""
    program = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
    linted = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_crash_tests_are_where_make_test_looks_for_them() -> None:
    marked = {path for path in _files("*.py", under=ROOT / "tests") if _CRASH in _text(path)}
    assert {path.parent.name for path in marked} == {"crash", "examples"}


def test_public_names_are_pinned() -> None:
    """A name enters or leaves the face of Holdfast only together with tests/conventions/public_names.txt."""
    holdfast = importlib.import_module("holdfast")
    pinned = _text(PUBLIC_NAMES).split()
    assert list(getattr(holdfast, "__all__", ["holdfast/__init__.py has no __all__"])) == pinned
    assert pinned == sorted(pinned)
    assert [name for name in pinned if not hasattr(holdfast, name)] == []


def test_package_is_typed_and_its_version_matches_the_project() -> None:
    version = tomllib.loads(_text(ROOT / "pyproject.toml"))["project"]["version"]
    released = re.findall(r"^## \[(\d[^\]]*)\]", _text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert released[0] == version
    assert (ROOT / "holdfast" / "py.typed").exists()


def _statement_files(stores: Path) -> dict[str, list[Path]]:
    """The SQL files of each store, its migrations apart: those are its own."""
    found: dict[str, list[Path]] = {}
    for path in sorted(stores.glob("*/**/*.sql")):
        store, *rest = path.relative_to(stores).parts
        if "migrations" not in rest:
            found.setdefault(store, []).append(path)
    return found


def _mismatched(stores: Path) -> list[str]:
    texts = {store: "\n".join(map(_text, paths)) for store, paths in _statement_files(stores).items()}
    shared, own = [
        {store: rules.statement_names(text, kind) for store, text in texts.items()} for kind in ("name", "own")
    ]
    return rules.mismatched(shared, own)


def test_every_sql_store_has_the_same_statements() -> None:
    files = [path for paths in _statement_files(STORES).values() for path in paths]
    assert [path.name for path in files if not rules.statement_names(_text(path))] == []
    assert files
    assert _mismatched(STORES) == []


def test_no_statement_reads_a_clock() -> None:
    _hold(_files("*.sql", under=STORES), rules.clocks)


@pytest.mark.parametrize(
    ("second", "problems"),
    [
        ("-- name: claim_ready\nSELECT 1;\n-- name: settle\nSELECT 2;\n", []),
        ("-- name: claim_ready\nSELECT 1;\n", ["two: settle is missing"]),
        ("-- name: claim_ready\n-- name: settle\n-- own: notify\n", []),
        ("-- name: claim_ready\n-- name: settle\n-- own: vacuum\n", ["vacuum is no store's own: 2 have it"]),
        ("-- name: claim_ready\n-- own: settle\n", ["two: settle is missing"]),
        ("-- name: settle\n-- name: settle\n", ["two: settle is defined 2 times", "two: claim_ready is missing"]),
    ],
)
def test_two_stores_are_compared_by_their_statements(tmp_path: Path, second: str, problems: list[str]) -> None:
    _write(tmp_path / "one" / "hot.sql", "-- name: claim_ready\nSELECT 1;\n")
    _write(tmp_path / "one" / "read.sql", "-- name: settle\nSELECT 1;\n-- own: vacuum\n")
    _write(tmp_path / "one" / "migrations" / "0001_jobs.sql", "-- name: only_here\nSELECT 1;\n")
    assert _mismatched(tmp_path) == []
    _write(tmp_path / "two" / "queries.sql", second)
    assert _mismatched(tmp_path) == problems


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count too."""
    graph = grimp.build_graph("holdfast", cache_dir=None)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while free := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in free:
            del left[module]
    imported = set().union(*left.values())
    assert sorted(left.keys() & imported) == []
