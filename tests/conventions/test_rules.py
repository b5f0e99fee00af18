"""Each rule of the house finds what it is for, and leaves alone what only looks like it."""

from __future__ import annotations

import pytest

from tests.conventions import rules


def _function(lines: int, docstring: str = "") -> str:
    return f"def long():\n{docstring}" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (_function(50), 0),
        (_function(51), 1),
        (_function(50, '    """One.\n\n    Two.\n    """\n'), 0),
        ("class Holder:\n    async " + _function(52).replace("\n", "\n    ").rstrip(), 1),
        ("pass\n" * 500, 0),
        ("pass\n" * 501, 1),
    ],
)
def test_length(source: str, found: int) -> None:
    assert len(rules.too_long(source)) == found


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class Open: ...", "the module has no docstring"),
        ('"""Said."""\nclass Open: ...', "line 2: Open has no docstring"),
        ('"""Said."""\nasync def open(): ...', "line 2: open has no docstring"),
        (
            '"""Said."""\nclass A:\n    """Said."""\n    def b(self):\n        c()\n        d()',
            "line 4: A.b has no docstring",
        ),
    ],
)
def test_a_missing_docstring_is_found(source: str, problem: str) -> None:
    assert problem in rules.undocumented(source)


def test_a_method_promised_by_a_protocol_is_documented_there() -> None:
    protocol = "class Clock(Protocol):\n    async def sleep(self):\n        ..."
    clock = '"""Said."""\nclass Real:\n    """Said."""\n    async def sleep(self):\n        a()\n        b()'
    assert rules.promised(protocol) == {"sleep"}
    assert rules.undocumented(clock, rules.promised(protocol)) == []
    assert rules.undocumented(clock) == ["line 4: Real.sleep has no docstring"]


@pytest.mark.parametrize(
    "source",
    [
        "class _Open: ...",
        "def _open(): ...",
        'def open():\n    """Said."""\n    def inner(): ...',
        'class Store(Protocol):\n    """Said."""\n    def get(self): ...',
        'class Job:\n    """Said."""\n    @property\n    def run_at(self):\n        return 1',
        'class Keeper(Service):\n    """Said."""\n    def start(self):\n        a()\n        b()',
    ],
)
def test_docstring_is_not_required_where_it_adds_nothing(source: str) -> None:
    assert rules.undocumented(f'"""Said."""\n{source}') == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import json, marshal as m",
        "from pickle import loads",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "yaml.load(text)",
        "run(text, shell=True)",
        "x = 1  # noqa",
        "x = 1  # noqa because",
        "x = 1  # type: ignore",
        "x = 1  # TODO later",
        '"""FIXME later."""',
        "@pytest.mark.skip\ndef test(): ...",
        "@pytest.mark.xfail(reason='')\ndef test(): ...",
        "pytest.skip('later')",
        "pytest.importorskip('redis')",
        "from pytest import skip",
    ],
)
def test_banned_constructs_are_found(source: str) -> None:
    assert len(rules.banned(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "text = 'import pickle; eval(x)  # TODO'",
        "regex.exec(text)",
        "run(text, shell=False)",
        "x = 1  # noqa: S608",
        "x = 1  # type: ignore[arg-type]",
        "query.skip(3)",
        "evaluate(text)",
    ],
)
def test_what_only_looks_banned_is_left_alone(source: str) -> None:
    assert rules.banned(source) == []


def test_unfinished_text_is_found_with_its_line() -> None:
    assert rules.unfinished("done\nXX" + "X: not done\n") == ["line 2: unfinished: XXX"]


@pytest.mark.parametrize("text", ["see /home" + "/me/x", "(/root" + "/x)", "https://pypi" + ".org", "<" * 7 + " ours"])
def test_forbidden_text_is_found(text: str) -> None:
    assert len(rules.forbidden_text(text)) == 1


@pytest.mark.parametrize("text", ["$HOME/work/x", "a/home/b", "the /home directory", "https://example.org/root/x"])
def test_ordinary_paths_are_left_alone(text: str) -> None:
    assert rules.forbidden_text(text) == []


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT now();",
        "SELECT CURRENT_TIMESTAMP;",
        "SELECT strftime('%s', 'x');",
        "SELECT datetime ('x');",
        "SELECT julianday('x');",
        "SELECT unixepoch();",
        "SELECT clock_timestamp();",
        "-- claims\nSELECT Now( );",
    ],
)
def test_a_clock_in_sql_is_found(sql: str) -> None:
    assert len(rules.clocks(sql)) == 1


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT coalesce(:now, statement_timestamp());",
        "SELECT run_at FROM job WHERE run_at <= :now AND (1);",
        "-- unlike now() this is a parameter\nSELECT ?1;",
        "/* not\nnow() */ SELECT snow(1);",
        "INSERT INTO job (datetime_us, now) VALUES (1, 2);",
    ],
)
def test_a_parameter_is_no_clock(sql: str) -> None:
    assert rules.clocks(sql) == []


def test_statement_names_are_read_in_order() -> None:
    sql = "-- name: b\nSELECT 1;\n-- a name: c\n-- own: d\nSELECT 3;\n-- name: a \nSELECT 2;"
    assert rules.statement_names(sql) == ["b", "a"]
    assert rules.statement_names(sql, "own") == ["d"]
