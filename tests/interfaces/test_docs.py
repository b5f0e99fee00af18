"""The documentation is true: every block runs, every link leads somewhere, every name it lists is there."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import Context, Holdfast, Job, JobHandle
from holdfast.core.models import Options
from tests.support import settings_page
from tests.support.pages import ROOT, Block, Reader, blocks
from tests.support.postgres import shared

DOCS = ROOT / "docs"
MADE = {"cli.md", "http-api.md", "settings.md"}  # from commands, operations and the table of settings
ELSEWHERE = {"cli.md", "http-api.md", "testing.md"}  # run by tests of the command line, the API and the testing kit
GUIDES = [ROOT / "README.md", *sorted(path for path in DOCS.glob("*.md") if path.name not in ELSEWHERE)]
RECORDS = sorted((DOCS / "adr").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *RECORDS]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"

_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_PATH = re.compile(r"`([\w./-]+(?:\.(?:py|sql|md|toml|txt)|/))`")


def _names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("path", GUIDES, ids=_names(GUIDES))
def test_every_block_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(name)
    page = path.read_text(encoding="utf-8")
    if "DATABASE_URL" in page:
        server = shared()
        monkeypatch.setenv("DATABASE_URL", server.url(server.create_database()))
    reader = Reader(tmp_path, f"page_{path.stem.replace('-', '_')}")
    try:
        for block in blocks(page):
            reader.run(block)
    finally:
        reader.close()


@pytest.mark.parametrize(
    "block",
    [
        Block("python", "raise ValueError('wrong')\n", 1),
        Block("python", "print('one')  # two\n", 1),
        Block("sh", "holdfast show key:nothing\n", 1),
        Block("sh", "holdfast config list  # exits 1\n", 1),
        Block("console", "$ holdfast config path\nsome queues\n", 1),
    ],
    ids=["an error", "another print", "a failure", "no failure", "another output"],
)
def test_a_block_that_is_not_true_is_noticed(block: Block, tmp_path: Path) -> None:
    reader = Reader(tmp_path, "page_of_lies")
    with pytest.raises((AssertionError, ValueError)):
        reader.run(block)
    reader.close()


# ── links and lengths ─────────────────────────────────────────────────────────────────────────────────────────────
def _slugs(path: Path) -> set[str]:
    """The anchors of a page's headings, as the usual hosts make them."""
    headings = _HEADING.findall(re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def _broken(path: Path) -> Iterator[str]:
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        if re.match(r"https?://|mailto:", target):
            continue
        found = (path.parent / file).resolve() if file else path
        if not found.exists():
            yield f"{target}: there is no such file"
        elif anchor and anchor not in _slugs(found):
            yield f"{target}: there is no such heading"


@pytest.mark.parametrize("path", PAGES, ids=_names(PAGES))
def test_every_link_leads_somewhere(path: Path) -> None:
    assert list(_broken(path)) == []


def test_every_guide_is_linked_from_the_readme() -> None:
    linked = set(_LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert [name for name in _names(sorted(DOCS.glob("*.md"))) if name not in linked] == []


def test_pages_stay_short() -> None:
    limits = {"README.md": 60, "ARCHITECTURE.md": 150, **dict.fromkeys(_names(RECORDS), 60)}
    limits |= {name: 200 for name in _names(sorted(DOCS.glob("*.md"))) if Path(name).name not in MADE}
    lengths = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in limits}
    assert {name: length for name, length in lengths.items() if length > limits[name]} == {}


def test_decision_records_are_numbered_one_by_one() -> None:
    assert [int(record.name[:4]) for record in RECORDS] == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_decision_record_follows_the_template(record: Path) -> None:
    lines = record.read_text(encoding="utf-8").splitlines()
    sections = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    template = ["Context", "Decision", "Alternatives", "Consequences"]
    assert sections == [name for name in template if name in sections]
    assert {"Context", "Consequences"} <= set(sections)
    assert [line for line in lines if len(line) > 200 and not line.startswith("|")] == []


# ── what there is ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_page_of_settings_is_current() -> None:
    """If not: python -m tests.support.settings_page > docs/settings.md"""
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == settings_page.page()


def _named_paths() -> list[str]:
    return _PATH.findall(ARCHITECTURE.read_text(encoding="utf-8"))


def test_every_path_the_architecture_names_exists() -> None:
    rooms = ("stores/sqlite", "stores/postgres", "web", "worker")
    places = (ROOT, ROOT / "holdfast", *[ROOT / "holdfast" / room for room in rooms])
    assert [name for name in _named_paths() if not any((place / name).exists() for place in places)] == []


def test_architecture_names_every_package() -> None:
    named = {name.rstrip("/").removeprefix("holdfast/") for name in _named_paths()}
    package = ROOT / "holdfast"
    rooms = [path.name for path in package.iterdir() if path.suffix == ".py" and not path.name.startswith("__")]
    rooms += [path.parent.name for path in package.glob("*/__init__.py")]
    assert sorted(set(rooms) - named) == []


def test_every_module_that_a_package_lists_exists() -> None:
    named = [
        (page.parent, name)
        for page in (ROOT / "holdfast").rglob("__init__.py")
        for name in re.findall(r"\b[a-z_]+\.py\b", ast.get_docstring(ast.parse(page.read_text(encoding="utf-8"))) or "")
    ]
    assert named
    assert [str(folder / name) for folder, name in named if not (folder / name).exists()] == []


def _reference() -> str:
    return (DOCS / "python-api.md").read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference() -> None:
    assert [name for name in holdfast.__all__ if not re.search(rf"`{name}\b", _reference())] == []


@pytest.mark.parametrize("kind", [Holdfast, JobHandle])
def test_every_public_method_is_in_the_reference(kind: type) -> None:
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    assert [name for name in methods if not re.search(rf"`{name}\(", _reference())] == []


def test_the_reference_names_attributes_that_a_job_has() -> None:
    (paragraph,) = [each for each in _reference().split("\n\n") if each.startswith("`Job`: ")]
    named = set(re.findall(r"`(\w+)", paragraph)) - {"Job"}
    assert named - {*dir(Job), *Options.__struct_fields__} == set()


_ENGINE = {"cancel", "final_outcome", "has_steps", "completing", "opened_log"}
"""What the worker alone uses of a context."""


@pytest.mark.parametrize(("page", "begin"), [("python-api.md", "`Context`: "), ("tasks.md", "It has `id`")])
def test_a_page_names_what_a_context_has_and_nothing_else(page: str, begin: str) -> None:
    (statement,) = [each for each in (DOCS / page).read_text(encoding="utf-8").split("\n\n") if each.startswith(begin)]
    named = set(re.findall(r"`(\w+)`", statement)) - {"Context"}
    assert named == {name for name in dir(Context) if not name.startswith("_")} - _ENGINE
