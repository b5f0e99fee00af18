"""cancel, replay, delete, dlq and queue."""

from __future__ import annotations

import inspect
import itertools
import random
from datetime import datetime, timedelta
from typing import Any

import pytest

from holdfast import Holdfast, JobFilter, Retry, Unavailable
from holdfast.core.lifecycle import Failed, Succeeded, decide
from holdfast.core.models import BulkResult
from holdfast.stores.base import ClaimRequest
from tests.interfaces.cli import Cli


def _enqueue(cli: Cli, *words: str) -> str:
    return cli.run("enqueue", "work", *words).strip()


def test_cancel_by_id_by_key_and_by_filter(cli: Cli) -> None:
    first, second, third = _enqueue(cli), _enqueue(cli, "--key", "k"), _enqueue(cli, "--queue", "mail")
    other = _enqueue(cli, "--queue", "other")
    assert cli.run("cancel", first, "key:k") == "2 jobs cancelled\n"
    assert cli.run("cancel", "--queue", "mail") == "1 job cancelled\n"
    assert [cli.state(each) for each in (first, second, third, other)] == ["cancelled"] * 3 + ["queued"]


def test_cancelling_what_runs_asks_it_to_stop(cli: Cli) -> None:
    job_id = _enqueue(cli)
    cli.claim(job_id)
    assert "asked to stop" in cli.run("cancel", "--all")
    assert cli.json("show", job_id)["cancelling"] is True


def test_impossible_operation_is_reported_and_exits_1(cli: Cli) -> None:
    dead = cli.dead()
    result = cli.invoke("cancel", dead, "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77")
    assert result.exit_code == 1
    assert f"job {dead} was not cancelled: it is dead" in result.stderr
    assert "there is no such job" in result.stderr
    assert cli.json("cancel", dead, code=1)["refused"] == [{"id": dead, "state": "dead"}]


@pytest.mark.parametrize("command", [["cancel"], ["replay"], ["delete"], ["dlq", "replay"], ["dlq", "purge"]])
def test_dry_run_counts_without_changing_anything(command: list[str], cli: Cli) -> None:
    ids = [_enqueue(cli), _enqueue(cli, "--delay", "1h"), cli.dead(), cli.dead()]
    done = {"cancel": 2, "replay": 2, "delete": 4}.get(command[0], 2)
    states = [cli.state(each) for each in ids]
    assert cli.json(*command, "--all", "--dry-run") == {"dry_run": True, "count": done}
    assert [cli.state(each) for each in ids] == states
    assert cli.json(*command, "--all")["count"] == done


def test_a_filter_reaches_every_job_however_many(cli: Cli) -> None:
    stream = '{"task": "work"}\n' * 2500
    cli.run("enqueue", "--stream", "-", stdin=stream)
    assert cli.run("cancel", "--all") == "2500 jobs cancelled\n"
    assert cli.run("delete", "--state", "cancelled") == "2500 jobs deleted\n"


@pytest.mark.parametrize("name", ["cancel", "replay", "delete"])
def test_an_outage_between_slices_says_how_many_jobs_are_done(
    name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.run("enqueue", "--stream", "-", stdin='{"task": "work"}\n' * 3)
    if name == "replay":
        cli.run("cancel", "--all")
    whole = inspect.unwrap(getattr(Holdfast, name))
    changed: list[str] = []

    async def lose_store(app: Holdfast, where: JobFilter, **options: Any) -> BulkResult:
        if changed:
            raise Unavailable("the store is away")
        answer: BulkResult = await whole(app, where, **{**options, "limit": 2})
        changed.extend(job_id for job_id, _ in answer.changed)
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(Holdfast, name, lose_store)
        shown = cli.fail(name, "--all", code=75)
    done = {"cancel": "cancelled", "replay": "queued again", "delete": "deleted"}[name]
    assert f"the store is away; before it, 2 jobs {done}; repeating it takes the rest" in shown
    assert cli.run(name, "--all") == f"1 job {done}\n"


def test_replay_reaches_every_job_though_some_die_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, replayed, replay = [cli.dead() for _ in range(5)], [], Holdfast._replay

    async def replay_two_that_die_again(app: Holdfast, where: JobFilter, **options: Any) -> BulkResult:
        answer = await replay(app, where, **{**options, "limit": 2})
        replayed.extend(job_id for job_id, _ in answer.changed)
        queueing = (await app.open_store()).queueing
        request = ClaimRequest("worker-1", {"*": 5}, limit=5, lease_for=timedelta(minutes=1))
        failed = Failed(error="it broke", retryable=False)
        claimed = (await queueing.claim(request)).jobs
        await queueing.settle([decide(job, failed, Retry.fixed(1), random.Random(0)) for job in claimed])
        return answer

    monkeypatch.setattr(Holdfast, "_replay", replay_two_that_die_again)
    assert cli.run("replay", "--state", "dead") == "5 jobs queued again\n"
    assert replayed == ids


def test_replay_needs_force_for_what_has_succeeded(cli: Cli) -> None:
    job_id = _enqueue(cli)
    cli.end(job_id, Succeeded())
    assert "--force" in cli.invoke("replay", job_id).stderr
    assert cli.json("replay", "--all")["count"] == 0
    assert cli.run("replay", job_id, "--force") == "1 job queued again\n"
    assert cli.state(job_id) == "queued"


def test_dlq_replay_points_to_replay_for_succeeded_jobs(cli: Cli) -> None:
    succeeded, queued = _enqueue(cli), _enqueue(cli)
    cli.end(succeeded, Succeeded())
    shown = cli.fail("dlq", "replay", succeeded, code=1)
    assert "it is succeeded; `holdfast replay` takes failed and cancelled jobs too, and with --force succeeded" in shown
    assert "it is queued" in cli.fail("dlq", "replay", queued, code=1)


def test_dead_letters_are_replayed_at_a_rate(cli: Cli) -> None:
    dead = [cli.dead() for _ in range(3)]
    assert cli.json("dlq", "replay", "--all", "--rate", "1/h", "--dry-run") == {
        "dry_run": True,
        "count": 3,
        "seconds": 10800,
    }
    assert cli.run("dlq", "replay", "--all", "--rate", "1/h") == "3 jobs queued again, one after the other over 3h\n"
    assert [cli.state(each) for each in dead] == ["queued", "scheduled", "scheduled"]
    assert 'rate: "fast" is not valid' in cli.fail("replay", "--all", "--rate", "fast", code=2).replace("'", '"')


def test_a_replay_of_many_slices_keeps_its_rate(cli: Cli) -> None:
    cli.run("enqueue", "--stream", "-", stdin='{"task": "work", "delay": "1h"}\n' * 1001)
    cli.run("cancel", "--all")
    shown = cli.json("replay", "--all", "--rate", "10/s")
    assert (shown["count"], shown["seconds"]) == (1001, 100.1)
    run_at = [job["run_at"] for job in cli.json("list", "--limit", "500")["jobs"]]
    assert len(set(run_at)) == 500
    gaps = [datetime.fromisoformat(a) - datetime.fromisoformat(b) for a, b in itertools.pairwise(run_at)]
    assert min(gaps) == timedelta(seconds=0.1)


def test_replay_takes_edited_arguments_and_checks_them(cli: Cli) -> None:
    target = cli.write_jobs()
    job_id = cli.run("enqueue", "mail.send", "--arg", "to=a").strip()
    cli.run("cancel", job_id)
    assert "'to'" in cli.fail("replay", job_id, "--payload", '{"to": 1}', "--app", target, code=2)
    assert cli.state(job_id) == "cancelled"
    cli.run("replay", job_id, "--payload", "-", "--app", target, stdin='{"to": "b"}')
    assert cli.json("show", job_id)["payload"] == {"to": "b"}


def test_delete_spares_what_runs_and_frees_the_key(cli: Cli) -> None:
    running, other = _enqueue(cli, "--key", "r"), _enqueue(cli, "--key", "k")
    cli.claim(running)
    assert "it is running: cancel it first" in cli.invoke("delete", running).stderr
    assert cli.run("delete", "--all") == "1 job deleted\n"
    assert _enqueue(cli, "--key", "k") != other
    assert cli.state(running) == "running"


def test_dead_letters_are_listed_shown_replayed_and_purged(cli: Cli) -> None:
    first, second = cli.dead(error="first"), cli.dead("--queue", "mail", error="second")
    waiting = _enqueue(cli)
    assert [job["id"] for job in cli.json("dlq", "list")["jobs"]] == [second, first]
    assert [job["id"] for job in cli.json("dlq", "list", "--queue", "mail")["jobs"]] == [second]
    assert cli.json("dlq", "show", first)["history"][0]["error"] == "first"
    assert "no dead letter" in cli.fail("dlq", "show", waiting, code=1)
    cancelled = _enqueue(cli)
    cli.run("cancel", cancelled)
    for command, each in itertools.product(("replay", "purge"), (waiting, cancelled)):
        assert "no dead letter" in cli.fail("dlq", command, first, each, code=1)
    assert cli.run("dlq", "replay", first) == "1 job queued again\n"
    assert cli.run("dlq", "purge", "--all") == "1 job deleted\n"
    assert cli.json("dlq", "list")["jobs"] == []
    assert [cli.state(each) for each in (first, waiting, cancelled)] == ["queued", "queued", "cancelled"]


def test_dead_letter_that_is_replayed_before_the_purge_stays(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, replay, delete = cli.dead(), inspect.unwrap(Holdfast.replay), inspect.unwrap(Holdfast.delete)

    async def replay_first(app: Holdfast, ids: list[str], **options: Any) -> BulkResult:
        await replay(app, ids)
        answer: BulkResult = await delete(app, ids, **options)
        return answer

    monkeypatch.setattr(Holdfast, "delete", replay_first)
    result = cli.invoke("dlq", "purge", job_id)
    assert (result.exit_code, "it is queued; `holdfast delete` takes any job" in result.stderr) == (1, True)
    assert cli.state(job_id) == "queued"


def test_a_queue_is_paused_and_resumed(cli: Cli) -> None:
    cli.run("queue", "pause", "mail", "other")
    assert {each["name"]: each["paused"] for each in cli.json("queue", "list")["queues"]} == {
        "mail": True,
        "other": True,
    }
    assert "mail (paused)" in cli.run("queue", "list")
    cli.run("queue", "resume", "mail")
    assert [each["name"] for each in cli.json("queue", "list")["queues"]] == ["other"]


def test_purging_a_queue_leaves_what_runs_and_what_has_ended(cli: Cli) -> None:
    queued, scheduled = _enqueue(cli, "--queue", "mail"), _enqueue(cli, "--queue", "mail", "--delay", "1h")
    running, dead, shared_worker_id = _enqueue(cli, "--queue", "mail"), cli.dead("--queue", "mail"), _enqueue(cli)
    cli.claim(running)
    assert cli.run("queue", "purge", "mail", "--dry-run") == "2 jobs would be deleted\n"
    assert cli.run("queue", "purge", "mail") == "2 jobs deleted\n"
    assert [cli.state(each) for each in (running, dead, shared_worker_id)] == ["running", "dead", "queued"]
    for gone in (queued, scheduled):
        cli.fail("show", gone, code=1)


def test_pausing_or_purging_an_unused_queue_says_so(cli: Cli) -> None:
    cli.run("enqueue", "work", "--queue", "mail")
    assert cli.invoke("queue", "pause", "mail").stderr == ""
    result = cli.invoke("queue", "pause", "nosuch")
    assert (result.exit_code, result.stdout) == (0, "nosuch: paused\n")
    for each in (result, cli.invoke("queue", "purge", "other"), cli.invoke("queue", "purge", "other", "--dry-run")):
        assert "no job is kept of queue" in each.stderr
    assert cli.invoke("queue", "purge", "mail", "--dry-run").stderr == ""


def test_unused_queue_in_a_filter_is_mentioned(cli: Cli) -> None:
    cli.dead("--queue", "mail")
    for words in (("dlq", "replay"), ("dlq", "replay", "--dry-run"), ("cancel",), ("delete",)):
        assert "no job is kept of queue mial" in cli.invoke(*words, "--queue", "mial").stderr
        assert "queue" not in cli.invoke(*words[:2], "--queue", "mail", "--dry-run").stderr
