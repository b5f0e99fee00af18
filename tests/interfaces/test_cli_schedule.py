"""holdfast schedule: recurring jobs from the command line."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Holdfast, Unavailable
from holdfast.core.models import Job
from holdfast.stores.sqlite.queueing import SqliteQueueing
from tests.interfaces.cli import Cli, store_without_answer

ADD = ("schedule", "add", "nightly", "report.send", '{"team": "all"}')


def test_schedule_is_added_listed_shown_and_removed(cli: Cli) -> None:
    added = cli.json(*ADD, "--cron", "0 3 * * *", "--zone", "Europe/Zurich", "--queue", "slow", "--overlap", "skip")
    assert (added["state"], added["queue"], added["payload"], added["owner"]) == (
        "active",
        "slow",
        {"team": "all"},
        None,
    )
    assert len(added["next_runs"]) == 5
    assert cli.json("schedule", "list")["schedules"] == [added]
    assert cli.json("schedule", "show", "nightly") == added
    listed = cli.run("schedule", "list")
    assert "cron 0 3 * * * (Europe/Zurich)" in listed
    assert "active" in listed
    shown = cli.run("schedule", "show", "nightly")
    assert added["next_runs"][4] in shown
    assert '"team": "all"' in shown
    assert cli.run("schedule", "next", "nightly", "--count", "2").splitlines() == added["next_runs"][:2]
    assert cli.json("schedule", "next", "nightly")["runs"] == added["next_runs"]
    assert cli.run("schedule", "remove", "nightly") == "nightly: removed\n"
    assert "no schedules" in cli.run("schedule", "list")


def test_paused_schedule_says_so_until_it_is_resumed(cli: Cli) -> None:
    cli.run(*ADD, "--every", "5m")
    assert cli.run("schedule", "pause", "nightly") == "nightly: paused\n"
    assert "paused" in cli.run("schedule", "list")
    assert "no run" in cli.run("schedule", "next", "nightly")
    assert cli.json("schedule", "resume", "nightly") == {"schedules": ["nightly"], "done": "resumed"}
    assert cli.json("schedule", "show", "nightly")["state"] == "active"


def test_run_and_backfill_submit_jobs(cli: Cli) -> None:
    cli.run(*ADD, "--cron", "0 3 * * *")
    job_id = cli.run("schedule", "run", "nightly").strip()
    assert cli.state(job_id) == "queued"
    days = ("--from", "2020-01-01T00:00:00Z", "--to", "2020-01-04T00:00:00Z")
    assert cli.run("schedule", "backfill", "nightly", *days, "--dry-run") == "3 jobs would be submitted\n"
    assert cli.run("schedule", "backfill", "nightly", *days) == "3 jobs submitted\n"
    assert cli.run("schedule", "backfill", "nightly", *days) == "0 jobs submitted, 3 there already\n"
    assert cli.json("count", "--tag", "schedule:nightly")["count"] == 4


def test_outage_during_a_run_names_its_job(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.run(*ADD, "--cron", "0 3 * * *")

    async def lose_store(app: Holdfast, job_id: str) -> Job:
        raise Unavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(Holdfast, "get", lose_store)
        shown = cli.json("schedule", "run", "nightly")
    assert shown == {"id": cli.json("list")["jobs"][0]["id"]}
    with monkeypatch.context() as patched:
        patched.setattr(SqliteQueueing, "submit", store_without_answer)
        stderr = cli.fail("schedule", "run", "nightly", code=75)
    assert f"its id is {cli.json('list')['jobs'][0]['id']}\n" in stderr
    assert len(cli.json("list")["jobs"]) == 2


def test_existing_name_is_refused_unless_replaced(cli: Cli) -> None:
    cli.run(*ADD, "--every", "5m")
    assert "exists" in cli.fail(*ADD, "--every", "6m", code=1)
    assert cli.json(*ADD, "--every", "6m", "--replace")["every"] == 360


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "exactly one of cron, every and at"),
        (("--cron", "0 3 * * *", "--every", "5m"), "exactly one of cron, every and at"),
        (("--cron", "0 3 * *"), "cron"),
        (("--cron", "0 0 31 2 *"), "cron"),
        (("--cron", "0 3 * * *", "--zone", "Mars/Olympus"), "zone"),
        (("--every", "5m", "--zone", "Europe/Zurich"), "zone"),
        (("--every", "often"), "every"),
        (("--at", "2001-01-01T00:00:00Z"), "at"),
        (("--every", "5m", "--overlap", "never"), "overlap"),
        (("--every", "5m", "--jitter", "2d"), "jitter"),
        (("--every", "5m", "--catch-up", "101"), "catch_up"),
        (("--every", "5m", "--max-runs", "0"), "max_runs"),
        (("--every", "5m", "--key", "k"), "No such option"),
        (("--every", "5m", "--delay", "5m"), "No such option"),
    ],
)
def test_bad_schedule_is_refused_with_its_field(cli: Cli, words: tuple[str, ...], message: str) -> None:
    cli.run("migrate")
    assert message in cli.fail(*ADD, *words, code=2)
    assert cli.json("schedule", "list")["schedules"] == []


@pytest.mark.parametrize("command", ["show", "pause", "resume", "run", "next", "remove"])
def test_unknown_schedule_exits_1(cli: Cli, command: str) -> None:
    cli.run(*ADD, "--every", "5m")
    assert "there is no schedule other" in cli.fail("schedule", command, "other", code=1)


def test_none_of_several_is_paused_where_one_is_unknown(cli: Cli) -> None:
    cli.run(*ADD, "--every", "5m")
    cli.fail("schedule", "pause", "nightly", "other", code=1)
    assert cli.json("schedule", "show", "nightly")["state"] == "active"


def test_declared_schedule_is_not_replaced(cli: Cli) -> None:
    async def declare() -> None:
        async with Holdfast() as app:
            app.schedule("nightly", app.draft_job("report.send", {}), every=60)
            await app.schedules.reconcile(app.declared)

    asyncio.run(declare())
    assert "declared in code" in cli.fail(*ADD, "--every", "5m", "--replace", code=1)
    assert cli.json("schedule", "show", "nightly")["owner"] == "code"
    removed = cli.invoke("schedule", "remove", "nightly")
    assert removed.stdout == "nightly: removed\n"
    assert "nightly: declared in code or settings; a worker that starts with them adds it again" in removed.stderr


def test_schedule_of_an_unknown_task_is_added_with_a_warning(cli: Cli) -> None:
    added = cli.invoke("--app", cli.write_jobs(), "schedule", "add", "a", "mail.sent", "--every", "5m")
    assert added.exit_code == 0
    assert "warning: the application has no task mail.sent; did you mean mail.send?" in added.stderr
