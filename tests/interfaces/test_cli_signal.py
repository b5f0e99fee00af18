"""holdfast signal, enqueue --after, show --tree: workflows from the command line."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from holdfast import Context, Holdfast
from holdfast.worker import Worker
from tests.interfaces.cli import Cli


def waiting_job() -> str:
    """The id of a job that waits for a signal, with one step and one child."""

    async def run() -> str:
        app = Holdfast()

        @app.task("charge")
        async def charge(order: int) -> int:
            return order

        @app.task("order")
        async def order(context: Context, number: int) -> None:
            await context.step("reserve", str, number)
            await context.call(charge, number)
            await context.wait_for(f"approved:{number}", timeout=timedelta(days=7))

        async with app:
            handle = await order.enqueue(42)
            await Worker(app, drain=True).run()
            return handle.id

    return asyncio.run(run())


def test_signal_is_kept_listed_and_known_by_its_id(cli: Cli) -> None:
    cli.run("migrate")
    assert "kept" in cli.run("signal", "send", "approved:42", '{"by": "Ada"}', "--id", "one")
    assert "sent before" in cli.run("signal", "send", "approved:42", "2", "--id", "one")
    cli.run("signal", "send", "other")
    [found] = cli.json("signal", "list", "approved:42")["signals"]
    assert (found["id"], found["topic"], found["value"]) == ("one", "approved:42", {"by": "Ada"})
    assert len(cli.json("signal", "list")["signals"]) == 2
    assert "approved:42" in cli.run("signal", "list")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("approved", "yes"), "give a JSON value"),
        (("approved#2", "1"), "without #"),
        (("a\nb", "1"), "one line"),
        (("", "1"), "one line"),
        (("a", "1", "--id", ""), "id"),
    ],
)
def test_signal_that_is_not_valid_is_refused(cli: Cli, words: tuple[str, ...], text: str) -> None:
    cli.run("migrate")
    assert text in cli.fail("signal", "send", *words, code=2)
    assert cli.json("signal", "list") == {"signals": []}


def test_waiting_job_says_what_it_waits_for(cli: Cli) -> None:
    cli.run("migrate")
    job_id = waiting_job()
    shown = cli.run("show", job_id)
    assert "waiting (signal)" in shown
    assert "signal approved:42, until" in shown
    document = cli.json("show", job_id)
    assert document["waits"]["receiver"]["topic"] == "approved:42"
    assert [each["child"] for each in document["waits"]["dependencies"]] == [True]
    assert "holdfast signal send approved:42" in cli.run("why", job_id)
    tree = cli.run("show", job_id, "--tree")
    assert "· reserve" in tree
    assert "calls charge" in tree
    assert f"received by job {job_id}" in cli.run("signal", "send", "approved:42", "true")
    nodes = cli.json("show", job_id, "--tree")["jobs"]
    assert [(each["task"], each["state"]) for each in nodes] == [("order", "scheduled"), ("charge", "succeeded")]


def test_job_is_submitted_after_others(cli: Cli) -> None:
    first = cli.json("enqueue", "work", "{}")["id"]
    second = cli.json("enqueue", "work", "{}", "--after", first)["id"]
    third = cli.json("enqueue", "work", "{}", "--after", second, "--after", f"{first}:end")["id"]
    assert cli.json("show", second)["state"] == "waiting"
    assert cli.json("show", second)["run_at"] is None
    why = cli.run("why", third)
    assert f"it waits for job {first}" in why
    assert f"it waits for job {second} (work), which is waiting" in why
    assert [each["id"] for each in cli.json("show", first, "--tree")["jobs"]] == [first, second, third]
    cli.run("cancel", first)
    assert cli.json("show", third)["reason"] == "dependency"
    assert f"job {first}, for which it waited, is cancelled" in cli.run("why", second)


@pytest.mark.parametrize(
    ("after", "text"),
    [
        ("nonsense", "give a job"),
        ("0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77", "give jobs that are stored"),
        ("0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77:never", "success, failure, end"),
    ],
)
def test_dependency_that_names_no_job_is_refused(cli: Cli, after: str, text: str) -> None:
    cli.run("migrate")
    assert text in cli.fail("enqueue", "work", "{}", "--after", after, code=2)
    assert cli.json("list")["jobs"] == []


def test_step_that_is_not_recorded_is_no_place_to_replay_from(cli: Cli) -> None:
    job_id = cli.json("enqueue", "work", "{}")["id"]
    cli.run("cancel", job_id)
    assert "none is recorded" in cli.fail("replay", job_id, "--from-step", "charge", code=2)
    assert "name its id" in cli.fail("replay", "--all", "--from-step", "charge", code=2)
    assert cli.json("show", job_id)["state"] == "cancelled"


def test_waiting_job_takes_no_time_of_its_own(cli: Cli) -> None:
    first = cli.json("enqueue", "work", "{}")["id"]
    second = cli.json("enqueue", "work", "{}", "--after", first)["id"]
    assert "has no time of its own" in cli.fail("edit", second, "--delay", "5m", code=1)
    assert cli.json("edit", second, "--priority", "7")["priority"] == 7
