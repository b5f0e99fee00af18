"""Batches and forks from the command line."""

from __future__ import annotations

import asyncio

from holdfast import Context, Holdfast
from holdfast.core.ids import new_id
from holdfast.core.lifecycle import Failed
from holdfast.worker import Worker
from tests.interfaces.cli import Cli


def waiting_batch() -> str:
    """The id of a batch of two jobs that no worker has taken."""

    async def run() -> str:
        app = Holdfast()

        @app.task("mail.send")
        async def send(to: str) -> None: ...

        async with app:
            return (await app.enqueue_batch([send.new_job("ada"), send.new_job("grace")])).id

    return asyncio.run(run())


def ended_job() -> str:
    """The id of a job that has succeeded, with two steps."""

    async def run() -> str:
        app = Holdfast()

        @app.task("order")
        async def order(context: Context, number: int) -> None:
            await context.step("reserve", str, number)
            await context.step("charge", str, number)

        async with app:
            handle = await order.enqueue(42)
            await Worker(app, drain=True).run()
            return handle.id

    return asyncio.run(run())


def test_batch_is_shown_explained_and_joined(cli: Cli) -> None:
    batch = waiting_batch()
    assert "2 jobs of the batch: 0 have ended, 0 have failed" in cli.run("show", batch)
    assert cli.json("show", batch)["waits"]["batch"] == {"members": 2, "ended": 0, "failed": 0}
    assert "it is a batch: 0 of its 2 jobs have ended" in cli.run("why", batch)
    member = cli.run("enqueue", "mail.send", "--arg", "to=joan", "--in-batch", batch).strip()
    assert cli.json("show", batch)["waits"]["batch"]["members"] == 3
    assert (cli.json("show", member)["batch"], f"batch     {batch}" in cli.run("show", member)) == (batch, True)
    cli.run("cancel", member)
    assert "3 jobs of the batch: 1 have ended, 1 have failed" in cli.run("show", batch)
    tree = cli.run("show", batch, "--tree").splitlines()
    assert [line.split()[:2] for line in tree[1:]] == [["has", "mail.send"]] * 3
    cli.run("cancel", batch)
    assert "it is a batch, and cancelled since" in cli.run("why", batch)
    assert cli.run("replay", batch, code=1) == "0 jobs queued again\n"
    assert f"batch {batch} has ended" in cli.fail("enqueue", "mail.send", "--arg", "to=x", "--in-batch", batch, code=1)


def test_dry_run_of_a_replay_counts_no_batch(cli: Cli) -> None:
    batch = waiting_batch()
    for job_id in [each["id"] for each in cli.json("list")["jobs"] if each["task"] == "mail.send"]:
        cli.end(job_id, Failed(error="broken", retryable=False))
    for chosen, number in ((["--all"], 2), ([batch], 0), (["--all", "--task", "mail.send"], 2)):
        assert cli.json("dlq", "replay", *chosen, "--dry-run")["count"] == number
    assert cli.json("dlq", "purge", "--all", "--dry-run")["count"] == 3
    assert cli.json("dlq", "replay", "--all")["count"] == 2


def test_batch_whose_failed_jobs_are_gone_says_that_nothing_repairs_it(cli: Cli) -> None:
    batch = waiting_batch()
    cli.run("cancel", "--task", "mail.send")
    assert "to replay jobs of it that have failed" in cli.run("why", batch)
    failed = cli.json("list", "--task", "mail.send")["jobs"]
    cli.run("delete", failed[0]["id"])  # the other one alone repairs nothing
    said = cli.run("why", batch)
    gone = "2 of 2 jobs of the batch have failed; failed jobs of it no longer exist, so that no replay repairs it"
    assert gone in said
    assert f"submit it again; to delete this one: holdfast delete {batch}" in said


def test_show_counts_every_job_of_a_large_batch(cli: Cli) -> None:
    batch = waiting_batch()
    line = f'{{"task": "mail.send", "payload": {{"to": "joan"}}, "batch": "{batch}"}}\n'
    cli.run("enqueue", "--stream", "-", stdin=line * 1_200)
    lines = cli.run("show", batch).splitlines()
    assert "  1,202 jobs of the batch: 0 have ended, 0 have failed" in lines
    assert sum(each.startswith("  job ") for each in lines) == 19
    assert "  and 1,183 more" in lines


def test_job_joins_a_batch_from_a_stream(cli: Cli) -> None:
    batch = waiting_batch()
    line = f'{{"task": "mail.send", "payload": {{"to": "joan"}}, "batch": "{batch}"}}\n'
    cli.run("enqueue", "--stream", "-", stdin=line * 3)
    assert cli.json("show", batch)["waits"]["batch"]["members"] == 5


def test_batch_that_is_none_is_refused(cli: Cli) -> None:
    cli.run("migrate")
    for no_batch in (new_id(), "mine"):
        assert "batch" in cli.fail("enqueue", "mail.send", "--arg", "to=x", "--in-batch", no_batch, code=2)
    assert cli.json("count")["count"] == 0


def test_ended_job_is_forked(cli: Cli) -> None:
    job_id, fork_id = ended_job(), new_id()
    assert cli.run("fork", job_id, "--from-step", "charge", "--id", fork_id).strip() == fork_id
    shown = cli.json("show", fork_id)
    assert ([step["name"] for step in shown["steps"]], shown["state"]) == (["reserve"], "queued")
    assert (shown["forks"], f"fork of   {job_id}" in cli.run("show", fork_id)) == (job_id, True)
    again = cli.json("fork", job_id, "--from-step", "charge", "--id", fork_id)
    assert again == {"id": fork_id, "created": False}
    assert cli.json("fork", job_id, "--payload", '{"number": 43}')["created"] is True
    assert "it is queued; wait for its end" in cli.fail("fork", fork_id, code=1)
    assert "recorded are reserve, charge" in cli.fail("fork", job_id, "--from-step", "ship", code=2)
    cli.fail("fork", new_id(), code=1)
