"""Limits in settings: read, shown, refused, and declared beside those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import Holdfast, Settings
from holdfast.core.errors import ConfigError
from holdfast.core.limit_options import LimitOptions, draft_limit

CRM = """\
poll = 1
[limits.crm]
task = "crm.sync"
by = "args.tenant"
concurrency = 2
rate = "10/s"
shares = { acme = 3 }

[limits.mail]
queue = "mail"
depth = 100
"""
DRAFTS = {
    "crm": draft_limit(
        "crm", LimitOptions(task="crm.sync", by="args.tenant", concurrency=2, rate="10/s", shares={"acme": 3})
    ),
    "mail": draft_limit("mail", LimitOptions(queue="mail", depth=100)),
}


def load(folder: Path, text: str | None = None, name: str = "holdfast.toml", **environ: str) -> Settings:
    (folder / ".git").mkdir(exist_ok=True)
    if text is not None:
        (folder / name).write_text(text)
    return Settings.load(directory=folder, environ=environ)


def test_limits_are_tables_with_the_options_of_the_code(tmp_path: Path) -> None:
    settings = load(tmp_path, CRM)
    assert dict(settings.limits) == DRAFTS
    assert settings.source_of("limits") == "holdfast.toml:2"


def test_limits_read_back_from_what_is_shown(tmp_path: Path) -> None:
    shown = load(tmp_path, CRM).describe_setting("limits").text
    again = load(tmp_path, "", HOLDFAST_LIMITS=shown)
    assert (dict(again.limits), again.source_of("limits")) == (DRAFTS, "HOLDFAST_LIMITS")
    assert '"mail": {"queue": "mail", "depth": 100}' in shown


def test_limits_in_a_project_file(tmp_path: Path) -> None:
    text = "".join(
        f"[tool.holdfast.{line[1:]}" if line[0] == "[" else line for line in CRM.splitlines(True)[1:] if line != "\n"
    )
    assert dict(load(tmp_path, text, "pyproject.toml").limits) == DRAFTS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[limits.crm]\nqueue = "crm"\nrate = "10/x"',
            "holdfast.toml:3: limits.crm.rate: '10/x' is not valid; give starts",
        ),
        ('[limits.a]\nqueue = "a"\ndepth = 5\n[limits.b]\ndepth = 5', "holdfast.toml:4: limits.b.queue: "),
        ('[limits.crm]\nqueue = "crm"\ndeepth = 5', "holdfast.toml:3: limits.crm.deepth: .*; did you mean depth"),
        ('[limits.crm]\nqueue = "crm"\ndepth = "5"', "holdfast.toml:3: limits.crm.depth: '5' is not valid"),
        ('[limits.crm]\nqueue = "crm"\ntask = "a"\ndepth = 5', "holdfast.toml:3: limits.crm.task: "),
        ("[limits.crm]\nqueue = 5\ndepth = 5", "holdfast.toml:2: limits.crm.queue: 5 is not valid"),
        ('[limits."No Name"]\nqueue = "a"\ndepth = 5', "holdfast.toml:1: limits: 'No Name' is not valid"),
        (
            "[limits]\ncrm = 5",
            r"holdfast.toml:2: limits.crm: 5 is not valid; write its options in a table, \[limits.crm\]",
        ),
        ("limits = 5", "holdfast.toml:1: limits: 5 is not valid; write a table for each"),
        ("limits = '[]'", "holdfast.toml:1: limits: .* is not valid; write a table for each"),
        ("limits = '{'", "holdfast.toml:1: limits: '{' is not valid; write a table for each"),
        ("limits = '{\"a\": 5}'", "holdfast.toml:1: limits.a: 5 is not valid"),
    ],
)
def test_bad_limit_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text)


def test_bad_limit_of_the_environment_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^HOLDFAST_LIMITS: limits.a.concurrency: 0 is not valid"):
        load(tmp_path, HOLDFAST_LIMITS='{"a": {"queue": "a", "concurrency": 0}}')


def test_limit_of_code_and_settings_is_refused_with_both_places(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", settings=load(tmp_path, CRM))
    app.limit("other", queue="mail", concurrency=1)
    with pytest.raises(
        ConfigError, match=r"'crm' is declared in the code and as limits.crm in holdfast.toml; remove one"
    ):
        app.limit("crm", queue="crm", concurrency=1)


def test_limits_of_settings_may_be_given_in_code(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db", limits={"mail": {"queue": "mail", "depth": 100}})
    assert dict(app.settings.limits) == {"mail": DRAFTS["mail"]}
