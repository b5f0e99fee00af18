"""config, retry-schedule, backup, migrate, and where a command looks for its store."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from holdfast.settings.settings import SETTINGS
from tests.interfaces.cli import JOBS, Cli
from tests.support.stores import migrations


def test_every_setting_is_listed_with_its_source(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("holdfast.toml").write_text('# ours\nlease = "60s"\n', encoding="utf-8")
    monkeypatch.setenv("HOLDFAST_CONCURRENCY", "3")
    listed = {each["name"]: each for each in cli.json("config", "list")["settings"]}
    assert set(listed) == set(SETTINGS)
    assert (listed["lease"]["value"], listed["lease"]["source"]) == ("1m", "holdfast.toml:2")
    assert (listed["concurrency"]["value"], listed["concurrency"]["source"]) == ("3", "HOLDFAST_CONCURRENCY")
    assert listed["grace"]["source"] == "default"
    assert listed["alerts"]["meaning"].startswith("Rules whose breach is an alert:")
    text = cli.run("config", "list")
    assert "holdfast.toml:2" in text
    assert ".md" not in text


def test_setting_a_value_keeps_comments_and_applies_next_time(cli: Cli) -> None:
    file = Path("holdfast.toml")
    file.write_text("# why: slow disks\nconcurrency = 2  # two\n", encoding="utf-8")
    cli.run("config", "set", "concurrency", "7")
    cli.run("config", "set", "commands", "argv")
    assert file.read_text(encoding="utf-8").startswith("# why: slow disks\nconcurrency = 7  # two\n")
    assert cli.run("config", "get", "concurrency") == "7\n"
    assert cli.json("config", "get", "commands")["source"].startswith("holdfast.toml:")


def test_a_value_that_the_environment_overrules_is_remarked_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_GRACE", "5s")
    assert "HOLDFAST_GRACE says otherwise" in cli.invoke("config", "set", "grace", "9s").stderr


def test_setting_not_reloaded_by_the_api_advises_a_restart(cli: Cli) -> None:
    assert "restart `holdfast api`" in cli.invoke("config", "set", "keys_file", "keys.toml").stderr
    assert cli.invoke("config", "set", "grace", "9s").stderr == ""


def test_the_settings_file_can_be_named(cli: Cli) -> None:
    assert cli.json("config", "path") == {"file": str(cli.folder / "holdfast.toml"), "exists": False}
    cli.run("config", "set", "grace", "9s", "--config", "mine.toml")
    assert cli.run("--config", "mine.toml", "config", "get", "grace") == "9s\n"
    assert cli.run("config", "get", "grace") == "30s\n"


def test_value_in_conflict_with_others_is_not_written(cli: Cli) -> None:
    cli.run("config", "set", "lease", "30s")
    before = Path("holdfast.toml").read_bytes()
    assert "third of the lease" in cli.fail("config", "set", "heartbeat", "20s", code=78)
    assert Path("holdfast.toml").read_bytes() == before


def test_a_password_is_hidden_in_every_listing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "postgresql://me:se%63ret@host/db")
    for words in (["config", "list"], ["config", "get", "url"], ["config", "list", "--json"]):
        given = cli.run(*words)
        assert "se%63ret" not in given
        assert "me:***@host" in given


# ── retry-schedule ────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_policy_s_delays_are_printed(cli: Cli) -> None:
    schedule = cli.json("retry-schedule", "exponential:base=5,factor=3,cap=300,jitter=scale:0.7:1", "--attempts", "6")
    assert [row["nominal"] for row in schedule["delays"]] == [5, 15, 45, 135, 300]
    assert [row["least"] for row in schedule["delays"]] == [3.5, 10.5, 31.5, 94.5, 210]
    assert [row["most"] for row in schedule["delays"]] == [5, 15, 45, 135, 300]
    assert schedule["delays"][-1]["in_all"] == 500
    assert "2m 15s" in cli.run("retry-schedule", "1,135", "--attempts", "3")


def test_the_policy_of_the_settings_and_of_a_task(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_RETRY", "fixed:9")
    assert [row["nominal"] for row in cli.json("retry-schedule")["delays"]] == [9, 9, 9, 9]
    target = cli.write_jobs()
    schedule = cli.json("retry-schedule", "--task", "mail.send", "--app", target)
    assert (schedule["attempts"], [row["nominal"] for row in schedule["delays"]]) == (3, [1, 1])
    assert cli.json("retry-schedule", "--task", "break", "--app", target)["delays"][0]["nominal"] == 9
    assert "did you mean mail.send?" in cli.fail("retry-schedule", "--task", "mail.sent", "--app", target, code=1)
    assert "--app module:name" in cli.fail("retry-schedule", "--task", "break", code=78)


# ── care ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_backup_is_a_store_of_its_own(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work").strip()
    assert cli.json("backup", "copy.db")["bytes"] == Path("copy.db").stat().st_size
    assert cli.json("show", job_id, "--url", "sqlite:///copy.db")["id"] == job_id
    assert "exists already" in cli.fail("backup", "copy.db", code=78)


def test_backup_to_an_impossible_path_is_refused_in_one_line(cli: Cli) -> None:
    cli.run("enqueue", "work")
    for place in ("/proc/copy.db", "n" * 300, "holdfast.db/copy.db"):
        error = cli.fail("backup", place, code=78)
        assert place.removesuffix("/copy.db") in error
        assert error.count("\n") == 1
    assert "name the file" in cli.fail("backup", ".", code=2)


def test_migrate_reports_what_it_applied_and_keeps_a_current_schema(cli: Cli) -> None:
    assert cli.json("migrate")["applied"] == migrations("sqlite")
    assert cli.json("migrate")["applied"] == []
    assert "up to date" in cli.run("migrate")


def test_a_file_that_is_no_store_of_ours_is_refused(cli: Cli) -> None:
    Path("text.db").write_text("this is not a database, however long one looks at it" * 20, encoding="utf-8")
    other = sqlite3.connect("other.db")
    other.execute("pragma application_id=7")
    other.execute("create table mine (a)")
    other.close()
    for name in ("text.db", "other.db"):
        assert name in cli.fail("status", "--url", f"sqlite:///{name}", code=78)


# ── where a command looks ─────────────────────────────────────────────────────────────────────────────────────────
def test_store_comes_from_the_application_unless_a_url_is_given(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    target = cli.write_jobs(JOBS.replace("Holdfast()", 'Holdfast("sqlite:///shop.db", lease="90s")'))
    cli.run("enqueue", "break", "--app", target)
    assert Path("shop.db").exists()
    cli.run("enqueue", "break", "--app", target, "--url", "sqlite:///stored.db")
    assert cli.json("status", "--url", "sqlite:///stored.db")["totals"]["queued"] == 1
    monkeypatch.setenv("HOLDFAST_APP", target)
    assert cli.json("status")["totals"]["queued"] == 1
    assert cli.json("--url", "sqlite:///stored.db", "status")["totals"]["queued"] == 1
    assert not Path("holdfast.db").exists()


def test_project_store_is_found_from_every_subfolder(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    project = cli.folder / "a project"
    (project / "src").mkdir(parents=True)
    (project / "holdfast.toml").write_text('url = "sqlite:///jobs.db"\n', encoding="utf-8")
    monkeypatch.chdir(project / "src")
    job_id = cli.run("enqueue", "work").strip()
    monkeypatch.chdir(project)
    assert cli.json("show", job_id)["id"] == job_id
    assert sorted(path.name for path in project.iterdir() if path.suffix == ".db") == ["jobs.db"]
    assert list((project / "src").iterdir()) == []


def test_what_the_application_s_code_says_holds_beside_options(cli: Cli) -> None:
    from holdfast.cli.context import Session

    session = Session()
    session.app = cli.write_jobs(JOBS.replace("Holdfast()", 'Holdfast("sqlite:///shop.db", lease="90s", processes=3)'))
    settings = session.load(processes="2", queues="mail:1").settings
    assert settings.describe_setting("lease").text == "90s"
    assert (settings.url, settings.processes, dict(settings.queues)) == ("sqlite:///shop.db", 2, {"mail": 1})


def test_secrets_of_the_application_s_code_hold_beside_options(cli: Cli) -> None:
    from holdfast.cli.context import Session

    urls = {
        "url": "postgresql://shop:s3cret@db.example.com/shop",
        "transport_url": "redis://:s3cret@cache.example.com:6379/0",
        "alert_webhook": "https://hooks.example.com/s3cret?token=abc",
    }
    session = Session()
    session.app = cli.write_jobs(JOBS.replace("Holdfast()", f'Holdfast(transport="redis_list", **{urls})'))
    settings = session.load(concurrency="20").settings
    assert {name: settings.get_value(name) for name in urls} == urls


@pytest.mark.parametrize(("commands", "warns"), [("off", True), ("shell", False)])
def test_a_worker_and_the_doctor_warn_of_an_application_without_tasks(commands: str, warns: bool, cli: Cli) -> None:
    target = cli.write_jobs(f"from holdfast import Holdfast\n\napp = Holdfast(commands={commands!r})\n")
    ended = cli.complete("worker", "start", "--drain", "--app", target)
    assert (ended.returncode, b"warning: the application has no tasks" in ended.stderr) == (0, warns)
    findings = {each["name"]: each for each in cli.json("doctor", "--app", target)["findings"]}
    assert (findings["application"]["level"], bool(findings["application"]["remedy"])) == (
        "warning" if warns else "ok",
        warns,
    )


def test_a_worker_needs_tasks_or_commands(cli: Cli) -> None:
    assert "HOLDFAST_APP" in cli.fail("worker", "start", code=78)
    for words in (
        ["--processes", "0"],
        ["--processes", "-1"],
        ["--processes", "x"],
        ["--queues", "Mail"],
        ["--role", "x"],
    ):
        assert words[0] in cli.fail("worker", "start", *words, "--app", cli.write_jobs(), code=2)
