"""edit, and --expires."""

from __future__ import annotations

import pytest

from tests.interfaces.cli import Cli


def _enqueue(cli: Cli, *words: str) -> str:
    return cli.run("enqueue", "work", *words).strip()


def test_every_value_of_a_waiting_job_is_edited(cli: Cli) -> None:
    job_id = _enqueue(cli, '{"n": 1}', "--key", "k", "--tag", "a")
    given = cli.run(
        "edit", "key:k", "--priority", "5", "--queue", "urgent", "--delay", "1h", "--tag", "b", "--expires", "2h",
        "--payload", '{"n": 2}',
    )  # fmt: skip
    assert given == f"job {job_id} edited: scheduled, queue urgent, priority 5\n"
    job = cli.json("show", job_id)
    assert (job["queue"], job["priority"], job["payload"], job["tags"]) == ("urgent", 5, {"n": 2}, ["b"])
    assert job["expires_at"] > job["run_at"]
    assert "expires" in cli.run("show", job_id)

    document = cli.json("edit", job_id, "--expires", "never", "--no-tags", "--delay", "0")
    assert (document["expires_at"], document["tags"], document["state"]) == (None, [], "queued")


def test_payload_is_checked_by_the_task(cli: Cli) -> None:
    target = cli.write_jobs()
    job_id = cli.run("enqueue", "mail.send", "--arg", "to=a@b.c", "--app", target).strip()
    wrong = '{"to": "a", "copies": "x"}'
    assert "'copies'" in cli.fail("edit", job_id, "--payload", wrong, "--app", target, code=2)
    edited = cli.json("edit", job_id, "--payload", "-", "--app", target, stdin='{"to": "d@e.f"}')
    assert edited["payload"] == {"to": "d@e.f"}


def test_running_and_ended_jobs_are_refused_with_a_remedy(cli: Cli) -> None:
    running, dead = _enqueue(cli), cli.dead()
    cli.claim(running)
    assert "it is running; cancel it" in cli.fail("edit", running, "--priority", "1", code=1)
    assert "it is dead; replay it" in cli.fail("edit", dead, "--priority", "1", code=1)
    assert "no job" in cli.fail("edit", "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77", "--priority", "1", code=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give payload, priority"),
        (["--priority", "101"], "priority"),
        (["--delay", "soon"], "delay"),
        (["--delay", "1m", "--run-at", "2030-01-31T08:00:00Z"], "give delay or run_at"),
        (["--expires", "0"], "expires.*above 0"),
        (["--expires", "soon"], "expires"),
        (["--queue", "No Queue"], "queue"),
        (["--payload", "[1]"], "payload"),
        (["--tag", "a", "--no-tags"], "not both"),
    ],
)
def test_wrong_edit_is_refused(cli: Cli, words: list[str], message: str) -> None:
    job_id = _enqueue(cli)
    before = cli.json("show", job_id)
    stderr = cli.fail("edit", job_id, *words, code=2)
    assert all(part in stderr for part in message.split(".*"))
    assert cli.json("show", job_id) == before


@pytest.mark.parametrize("when", ["90", "10m", "2035-01-31T08:00:00Z"])
def test_expiry_of_a_submission_is_shown(cli: Cli, when: str) -> None:
    job_id = _enqueue(cli, "--expires", when)
    assert cli.json("show", job_id)["expires_at"] is not None
    assert [each["code"] for each in cli.json("why", job_id)["reasons"]][-1] == "expires"
    assert "--expires 1h" in cli.run("why", job_id)


def test_line_of_a_stream_may_expire(cli: Cli) -> None:
    cli.run("enqueue", "--stream", "-", stdin='{"task": "work", "expires": "10m"}\n{"task": "work", "expires": 5}\n')
    assert all(job["expires_at"] for job in cli.json("list")["jobs"])


def test_job_of_a_schedule_expires_after_its_run(cli: Cli) -> None:
    cli.run("schedule", "add", "nightly", "work", "--every", "1h", "--expires", "10m")
    job = cli.json("schedule", "run", "nightly")
    assert cli.json("show", job["id"] if "id" in job else job["job"]["id"])["expires_at"] is not None
    assert "give a span" in cli.fail(
        "schedule", "add", "other", "work", "--every", "1h", "--expires", "2035-01-31T08:00:00Z", code=2
    )
