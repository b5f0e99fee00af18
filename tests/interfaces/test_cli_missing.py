"""Commands that look, on a database that is not there: they say so, and do not make one."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.interfaces.cli import Cli

JOB = "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77"
LOOKING = [
    ["status"],
    ["list"],
    ["show", JOB],
    ["why", JOB],
    ["watch"],
    ["watch", JOB],
    ["cancel", "--all"],
    ["replay", JOB],
    ["replay", JOB, "--payload", "{}"],
    ["delete", "--all"],
    ["dlq", "list"],
    ["dlq", "show", JOB],
    ["dlq", "replay", "--all"],
    ["dlq", "purge", "--all"],
    ["queue", "list"],
    ["queue", "purge", "mail"],
    ["worker", "list"],
    ["worker", "stop"],
    ["backup", "copy.db"],
]


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
def test_looking_makes_no_database(words: list[str], cli: Cli) -> None:
    given = cli.fail(*words, "--json", code=1).splitlines()
    assert given[0].startswith(f"holdfast: there is no database at {cli.folder}/holdfast.db yet (url from default); ")
    assert "`holdfast enqueue`" in given[0]
    assert json.loads(given[1])["error"]["type"] == "NotFound"
    assert list(cli.folder.iterdir()) == []


def test_source_of_the_url_is_named(cli: Cli) -> None:
    assert "manage.py" not in cli.fail("status", code=1)
    Path("manage.py").touch()
    assert "in a Django project: python manage.py holdfast" in cli.fail("status", code=1)
    Path("holdfast.toml").write_text('url = "sqlite:///jobs.db"\n', encoding="utf-8")
    assert f"{cli.folder}/jobs.db yet (url from holdfast.toml:1)" in cli.fail("status", code=1)


def test_doctor_reports_a_missing_database_and_makes_none(cli: Cli) -> None:
    report = cli.json("doctor", code=1)
    (error,) = [each for each in report["findings"] if each["level"] == "error"]
    assert (report["healthy"], error["name"]) == (False, "database")
    assert f"no database at {cli.folder}/holdfast.db" in error["text"]
    assert "holdfast worker start" in error["remedy"]
    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["enqueue", "work"], ["migrate"], ["queue", "pause", "mail"], ["queue", "resume", "mail"]], ids=" ".join
)
def test_what_stores_something_makes_the_database(words: list[str], cli: Cli) -> None:
    cli.run(*words)
    assert cli.run("status")


def test_broken_link_is_missing_and_unreachable_path_is_reported(cli: Cli) -> None:
    Path("holdfast.db").symlink_to(cli.folder / "elsewhere.db")
    assert f"no database at {cli.folder}/elsewhere.db" in cli.fail("status", code=1)
    assert "does not exist or is closed" in cli.fail("status", "--url", "sqlite:////nowhere/at/all.db", code=78)


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
def test_reading_a_foreign_database_changes_nothing_in_it(words: list[str], cli: Cli) -> None:
    with closing(sqlite3.connect("holdfast.db")) as connection:
        connection.execute("create table customer (name text)")
    before = Path("holdfast.db").read_bytes()
    given = cli.fail(*words, code=1)
    assert given.startswith(
        f"holdfast: the database at {cli.folder}/holdfast.db has no tables of Holdfast yet (url from "
    )
    assert "`holdfast migrate` makes it" in given
    assert [(each.name, each.read_bytes()) for each in cli.folder.iterdir()] == [("holdfast.db", before)]
    cli.run("migrate")
    assert cli.run("status")


def test_looking_into_an_empty_file_leaves_it_empty(cli: Cli) -> None:
    Path("holdfast.db").touch()
    assert "has no tables of Holdfast yet" in cli.fail("status", code=1)
    assert cli.json("doctor", code=1)["findings"][-1]["name"] == "database"
    assert Path("holdfast.db").read_bytes() == b""


def test_database_of_another_program_is_reported_without_remedy(cli: Cli) -> None:
    with closing(sqlite3.connect("holdfast.db")) as connection:
        connection.execute("pragma application_id=7")
        connection.execute("create table customer (name text)")
    assert "belongs to another program" in cli.fail("status", code=78)


def test_doctor_reports_settings_that_cannot_be_read(cli: Cli) -> None:
    Path("holdfast.toml").write_text("lease = = 3\n", encoding="utf-8")
    (finding,) = cli.json("doctor", code=1)["findings"]
    assert (finding["name"], finding["level"]) == ("settings", "error")
    assert finding["text"].startswith("holdfast.toml")
