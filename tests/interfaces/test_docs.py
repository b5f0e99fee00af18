"""The documentation is true: every block runs, every link leads somewhere, every name it lists is there.

Links to other sites are not followed.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

import pytest

import holdfast
from holdfast import Context, Dead, Holdfast, Job, JobHandle
from holdfast.core.models import Options
from tests.support import redis, settings_page
from tests.support.pages import ROOT, Block, Reader, blocks, find_block, is_run_by_another_test, is_runnable
from tests.support.postgres import shared
from tools.release.__main__ import INTERPRETERS
from tools.site.staging import DECISIONS, read_groups

DOCS = ROOT / "docs"
MADE = {"benchmarks.md", "cli.md", "http-api.md", "settings.md"}  # from results, commands, operations and settings
ELSEWHERE = {
    "docs/cli.md": ("interfaces/test_cli_tree.py", "text sh"),
    "docs/http-api.md": ("web/test_openapi_sqlite.py", "json"),
    "docs/testing.md": ("unit/test_testing.py", "python sh"),
    "docs/testing-transactions.md": ("integrations/test_pytest_plugin_postgres.py", "python"),
    "examples/atlas_jobs/README.md": ("examples/test_atlas_table.py", "python sh"),
    "examples/atlasqueue/README.md": ("examples/test_atlasqueue_papers.py", "python sh"),
    "examples/delayed_queue/README.md": ("examples/test_delayed_queue_running.py", "python sh"),
    "examples/queuectl/README.md": ("examples/test_queuectl_workers.py", "python sh"),
    "examples/streams/README.md": ("examples/test_streams_papers.py", "python sh"),
}
"""Pages that tests of their subject run or compare: the test, and the kinds of blocks that it takes."""
NOT_RUN = {
    ("ARCHITECTURE.md", "task.enqueue(…)"): "a diagram",
    ("docs/job-states.md", "submit"): "a diagram",
    ("docs/worker-protocol.md", "claim"): "a diagram",
    ("docs/worker-protocol.md", '{"worker": "js-7c1f"'): "the body of a request",
    ("docs/commands.md", '{"task": "command"'): "the body of a request",
    ("docs/http.md", '{\n  "type"'): "the body of a response",
    ("docs/alerts.md", '{\n  "id"'): "the body of a webhook",
    ("docs/events.md", "retry: 2000"): "the body of a response",
    ("docs/encryption.md", '{"$encrypted"'): "the form of a stored object",
    ("docs/observability.md", '{"timestamp"'): "a log line",
    ("docs/postgresql.md", "synchronous_standby_names"): "settings of a PostgreSQL server with two standbys",
    ("CONTRIBUTING.md", "### Changed"): "an entry of a changelog",
    ("deploy/README.md", "sudo useradd"): "makes a user of the system",
}
"""Blocks by page and beginning, each with the reason for which no test runs it. ``LEFT_OUT`` has single commands."""
EXAMPLES = [ROOT / "examples" / name / "README.md" for name in ("shop", "js_worker")]
GUIDES = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.glob("*.md") if f"docs/{path.name}" not in ELSEWHERE),
    *EXAMPLES,
]
RECIPES = [DOCS / f"{subject}.md" for subject in ("emails", "files", "payments", "etl", "webhooks")]
RECORDS = sorted((DOCS / "adr").glob("*.md"))
READMES = [ROOT / "deploy" / "README.md", *sorted(ROOT.glob("examples/*/README.md"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *RECORDS, *READMES]
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
    for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "DJANGO_", "PG"))]:
        monkeypatch.delenv(name)
    page = path.read_text(encoding="utf-8")
    if "DATABASE_URL" in page:
        server = shared()
        monkeypatch.setenv("DATABASE_URL", server.url(server.create_database()))
    if "REDIS_URL" in page:
        monkeypatch.setenv("REDIS_URL", redis.shared().url().removesuffix("0") + "8")
    if path in EXAMPLES:
        shutil.copytree(path.parent, tmp_path, dirs_exist_ok=True)
    reader = Reader(tmp_path, f"page_{path.stem.replace('-', '_')}")
    try:
        for block in blocks(page):
            if not is_run_by_another_test(str(path.relative_to(ROOT)), block):
                reader.run(block)
    finally:
        reader.close()


@pytest.mark.parametrize(
    "block",
    [
        Block("python", "raise ValueError('wrong')\n", 1),
        Block("python", "print('one')  # two\n", 1),
        Block("python", "print('1 of 3')  # 3 of 3\n", 1),
        Block("sh", "holdfast show key:nothing\n", 1),
        Block("sh", "holdfast config list  # exits 1\n", 1),
        Block("console", "$ holdfast config path\nsome queues\n", 1),
    ],
    ids=["an error", "another print", "another number", "a failure", "no failure", "another output"],
)
def test_a_block_that_is_not_true_is_noticed(block: Block, tmp_path: Path) -> None:
    reader = Reader(tmp_path, "page_of_lies")
    with pytest.raises((AssertionError, ValueError)):
        reader.run(block)
    reader.close()


def _list_blocks_not_run(page: str, text: str) -> Iterator[str]:
    """Yields the blocks of a page that no test runs and that ``NOT_RUN`` does not have."""
    found = blocks(text)
    if len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) != 2 * len(found):
        yield f"{page}: write each fence at the beginning of its line, as ``` and at most one word"
    _, kinds = ELSEWHERE.get(page, ("", ""))
    for block in found:
        is_run = ROOT / page in GUIDES and is_runnable(block)
        is_run = is_run or block.kind in kinds.split() or is_run_by_another_test(page, block)
        if not is_run and not any(page == name and _begins(block, begin) for name, begin in NOT_RUN):
            yield f"{page}:{block.line}: no test runs this block: {block.text.splitlines()[0]}"


def _begins(block: Block, beginning: str) -> bool:
    return block.text.lstrip().startswith(beginning)


def test_every_block_of_the_site_is_run_or_listed_with_a_reason() -> None:
    listed = [page for group in read_groups() for page in group.pages if page != DECISIONS]
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in ["README.md", *listed, *_names(RECORDS)]}
    assert [problem for page, text in texts.items() for problem in _list_blocks_not_run(page, text)] == []
    gone = [key for key in NOT_RUN if not any(_begins(block, key[1]) for block in blocks(texts[key[0]]))]
    assert gone == [], "remove these from NOT_RUN"
    for page, (test, _) in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8"), page


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("docs/tasks.md", "```text\nholdfast status\n```\n"),
        ("docs/tasks.md", "```\ncurl localhost:8000/metrics\n```\n"),
        ("docs/tasks.md", "```sql\nselect 1;\n```\n"),
        ("docs/tasks.md", "```toml\nqueues = 1\n```\n"),
        ("docs/tasks.md", "- a list\n\n  ```sh\n  holdfast status\n  ```\n"),
        ("docs/testing.md", "```console\n$ holdfast status\n```\n"),
        ("docs/postgresql.md", "```sql\nselect 1;\n```\n"),
        ("SECURITY.md", "```sh\nholdfast status\n```\n"),
    ],
)
def test_a_block_that_no_test_runs_is_noticed(page: str, text: str) -> None:
    (problem,) = _list_blocks_not_run(page, text)
    assert problem.startswith(page)


def test_code_in_contributing_is_code_of_the_checkout() -> None:
    test = find_block("CONTRIBUTING.md", "async def test_a_snoozed_job").text
    assert test in (ROOT / "tests" / "conformance" / "test_settle.py").read_text(encoding="utf-8")
    function = find_block("CONTRIBUTING.md", "def delay_after").text
    assert textwrap.indent(function, "    ") in (ROOT / "holdfast" / "core" / "retry.py").read_text(encoding="utf-8")


def test_every_recipe_is_run_and_listed_in_the_cookbook() -> None:
    cookbook = (DOCS / "cookbook.md").read_text(encoding="utf-8")
    recipes = [(page, part) for page in RECIPES for part in page.read_text(encoding="utf-8").split("\n## ")[1:]]
    assert len(recipes) >= 30
    for page, recipe in recipes:
        title = recipe.partition("\n")[0]
        assert any(is_runnable(block) for block in blocks(recipe)), f"{page.name}: {title}: give it a block"
        assert f"\n- [{title}]({page.name}#{_slug(title)})\n" in cookbook, f"{page.name}: {title}: list it"


# ── links and lengths ─────────────────────────────────────────────────────────────────────────────────────────────
def _slugs(path: Path) -> set[str]:
    """The anchors of a page's headings, as the usual hosts make them."""
    headings = _HEADING.findall(re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S))
    return {_slug(heading) for heading in headings}


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


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


def test_readme_has_one_picture_one_example_and_one_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"^!\[[^\]]{20,}\]\((\S+)\)$", text, re.MULTILINE)
    assert (ROOT / picture).is_file()
    assert (text.count("!["), text.count("```python"), len(re.findall(r"^\|[-| ]+\|$", text, re.MULTILINE))) == (
        1,
        1,
        1,
    )


def test_pages_stay_short() -> None:
    limits = {"README.md": 60, "ARCHITECTURE.md": 165, **dict.fromkeys(_names(RECORDS), 60)}
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


def test_python_versions_are_declared_alike() -> None:
    """By the page of versions, the classifiers, ``requires-python`` and the checks of a release."""
    page = (DOCS / "versions.md").read_text(encoding="utf-8").replace(", free-threaded", "t")
    rows = re.findall(r"^\| (3\.\d[^|]*) \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    versions = [version for names, _, _ in rows for version in names.split(", ")]
    assert [f"python{version}" for version in versions] == INTERPRETERS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classifiers = [each.removeprefix("Programming Language :: Python :: ") for each in project["classifiers"]]
    assert [each for each in classifiers if re.match(r"3\.\d", each)] == [each for each in versions if each[-1] != "t"]
    assert ("Free Threading :: 1 - Unstable" in classifiers) == any(each[-1] == "t" for each in versions)
    assert project["requires-python"] == f">={versions[0]}"
    assert [supported == "yes" for _, supported, _ in rows] == ["not run" not in tested for _, _, tested in rows]


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


_SIGNATURE = re.compile(r"`(?:await )?([A-Za-z][\w.]*)\(([^`]*)\)`")
_OWNERS = {"The application": Holdfast, "Jobs": JobHandle, "In a handler": Context}
"""The class whose methods a section of the reference lists."""
_UNDOCUMENTED = {
    "Holdfast": {"clock", "now"},
    "find_error_groups": {"allows"},
    "run_blocking": {"here"},
    "JobFields": {"name"},
}
"""Parameters for tests and for Holdfast's own programs, and that of ``logging.Filter``."""


def _printed_signatures() -> Iterator[tuple[str, str, str]]:
    """Yields the name of each function in the reference, its printed parameters, and its parameters."""
    for section in _reference().split("\n## ")[1:]:
        for name, parameters in _SIGNATURE.findall(section):
            path = name.removeprefix("context.")
            is_exported = path.partition(".")[0] in holdfast.__all__
            owner = holdfast if is_exported else _OWNERS.get(section.partition("\n")[0])
            function = attrgetter(path)(owner) if is_exported else getattr(owner, path, None)
            try:
                parsed = ast.parse(f"lambda {parameters}: 0", mode="eval").body
            except SyntaxError:  # a call, as an example
                continue
            assert isinstance(parsed, ast.Lambda)
            if function is not None and function is not Dead:  # an exception without a signature
                yield name, ast.unparse(parsed.args), _written_parameters(function)


def _written_parameters(function: Callable[..., object]) -> str:
    """Returns the parameters of a function without annotations; a default that is no literal is left out."""
    stars: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    hidden = {"self", *_UNDOCUMENTED.get(function.__name__, ())}
    parameters: list[str] = []
    for name, each in inspect.signature(function).parameters.items():
        if name in hidden:
            continue
        if each.kind is each.KEYWORD_ONLY and not any(known.startswith("*") for known in parameters):
            parameters.append("*")
        default = str(each.default) if isinstance(each.default, str) else each.default
        shown = f"={default!r}" if isinstance(default, str | int | float | tuple | None) else ""
        parameters.append(stars.get(each.kind, "") + name + shown)
    return ", ".join(parameters)


def test_signatures_in_the_reference_are_those_of_the_code() -> None:
    signatures = list(_printed_signatures())
    assert len(signatures) > 70
    assert [each for each in signatures if each[1] != each[2]] == []


def test_the_reference_names_attributes_that_a_job_has() -> None:
    (paragraph,) = [each for each in _reference().split("\n\n") if each.startswith("`Job`: ")]
    named = set(re.findall(r"`(\w+)", paragraph)) - {"Job"}
    assert named - {*dir(Job), *Options.__struct_fields__} == set()


_ENGINE = {"cancel", "final_outcome", "has_steps", "has_called_complete", "opened_log"}
"""What the worker alone uses of a context."""


@pytest.mark.parametrize(("page", "begin"), [("python-api.md", "`Context`: "), ("tasks.md", "It has `id`")])
def test_a_page_names_what_a_context_has_and_nothing_else(page: str, begin: str) -> None:
    (statement,) = [each for each in (DOCS / page).read_text(encoding="utf-8").split("\n\n") if each.startswith(begin)]
    named = set(re.findall(r"`(\w+)`", statement)) - {"Context"}
    assert named == {name for name in dir(Context) if not name.startswith("_")} - _ENGINE
