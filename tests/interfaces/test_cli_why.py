"""why: every reason for which a job does not run, with its remedy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import JobState
from holdfast.core.lifecycle import Failed
from holdfast.core.limits import Limit, LimitValues
from holdfast.core.models import Job, Reason
from holdfast.core.workers import WorkerCommand, WorkerHeartbeat, WorkerInfo, serves_queue
from holdfast.views.explain import JobFacts, explain_job
from holdfast.views.limit_use import LimitUse
from tests.interfaces.cli import Cli

NOW = 1_924_992_000_000_000
MINUTE = 60_000_000


def _job(state: JobState, **fields: Any) -> Job:
    plain = {
        "id": "0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77",
        "task": "work",
        "queue": "mail",
        "payload": "{}",
        "claims": 1,
        "attempts": 1,
        "max_attempts": 5,
        "priority": 0,
        "lost_leases": 0,
        "run_at_us": NOW - MINUTE,
        "created_at_us": NOW - MINUTE,
        "worker": "w-1",
    }
    return Job(**{**plain, "state": state, **fields})


def _worker(
    queues: str = "mail:2",
    *,
    name: str = "w-1",
    alive: bool = True,
    command: WorkerCommand = WorkerCommand.NONE,
    running: int = 0,
) -> WorkerInfo:
    heartbeat = WorkerHeartbeat(worker=name, host="here", pid=1, queues=queues, concurrency=2, running=running)
    return WorkerInfo(heartbeat=heartbeat, started_at_us=NOW, seen_at_us=NOW, alive=alive, command=command)


SERVED = JobFacts(now_us=NOW, workers=(_worker(),))
GONE = JobFacts(now_us=NOW, workers=(_worker(),), gone=frozenset({"w-1"}))
SILENT = JobFacts(now_us=NOW + 20_000_000, workers=(_worker(),), silence=timedelta(seconds=13))
DEAD = {"ended_at_us": NOW, "error": "it broke"}

CASES: list[tuple[Job, JobFacts, dict[str, str]]] = [
    (_job(JobState.QUEUED), SERVED, {"next": ""}),
    (_job(JobState.QUEUED), replace(SERVED, running={"mail": 1}), {"next": ""}),
    (_job(JobState.QUEUED), replace(SERVED, running={"mail": 2}), {"queue_bound": "raise the number of mail"}),
    (
        _job(JobState.QUEUED),
        JobFacts(now_us=NOW, workers=(_worker("news:1,*:2"),), running={"mail": 1, "sms": 1, "news": 1}),
        {"queue_bound": "start more workers"},
    ),
    (_job(JobState.QUEUED), JobFacts(now_us=NOW), {"no_worker": "worker start --queues mail"}),
    (_job(JobState.QUEUED), JobFacts(now_us=NOW, workers=(_worker("other,more"),)), {"no_worker": "worker start"}),
    (_job(JobState.QUEUED), JobFacts(now_us=NOW, workers=(_worker(alive=False),)), {"no_worker": "worker start"}),
    (
        _job(JobState.QUEUED),
        JobFacts(now_us=NOW, workers=(_worker(command=WorkerCommand.STOP),)),
        {"no_worker": "worker start"},
    ),
    (
        _job(JobState.QUEUED),
        JobFacts(now_us=NOW, workers=(_worker("*"),), paused=True),
        {"paused": "queue resume mail"},
    ),
    (
        _job(JobState.QUEUED),
        JobFacts(now_us=NOW, workers=(_worker("*"),), tasks=frozenset({"other"})),
        {"handler_unknown": "correct the name", "next": ""},
    ),
    (
        _job(JobState.QUEUED),
        JobFacts(now_us=NOW, tasks=frozenset({"other"})),
        {"no_worker": "start", "no_handler": "correct the name"},
    ),
    (
        _job(JobState.FAILED, run_at_us=NOW + MINUTE, reason="no_handler", error="no task"),
        SERVED,
        {"retry_later": "replay", "no_handler": "queues of their own"},
    ),
    (
        _job(JobState.QUEUED, reason="no_handler"),
        JobFacts(now_us=NOW, workers=(_worker("*"),), tasks=frozenset({"work"})),
        {"no_handler": "restart that worker"},
    ),
    (
        _job(JobState.QUEUED, task="command"),
        JobFacts(now_us=NOW, workers=(_worker(),), tasks=frozenset()),
        {"next": ""},
    ),
    (_job(JobState.QUEUED), JobFacts(now_us=NOW, workers=(_worker(),), ahead=3), {"behind": "more workers"}),
    (_job(JobState.QUEUED), JobFacts(now_us=NOW, workers=(_worker(),), exact=None), {"place_unknown": "more workers"}),
    (
        _job(JobState.QUEUED),
        JobFacts(now_us=NOW, workers=(_worker(running=2),), ahead=1),
        {"busy": "--concurrency", "behind": "more workers"},
    ),
    (_job(JobState.QUEUED), GONE, {"worker_silent": "holdfast worker start --queues mail"}),
    (_job(JobState.QUEUED), SILENT, {"worker_silent": "holdfast worker start"}),
    (
        _job(JobState.RUNNING, lease_until_us=NOW + MINUTE),
        replace(SILENT, workers=(_worker(alive=False),)),
        {"worker_silent": "holdfast worker start"},
    ),
    (_job(JobState.RUNNING, lease_until_us=NOW + MINUTE), GONE, {"worker_silent": "holdfast worker start"}),
    (
        _job(JobState.RUNNING, lease_until_us=NOW + MINUTE),
        replace(GONE, workers=(_worker(), _worker(name="w-2"), _worker("other", name="w-3"))),
        {"worker_silent": "nothing to do: 1 other worker serves queue mail"},
    ),
    (
        _job(JobState.RUNNING, lease_until_us=NOW + MINUTE, attempts=5),
        replace(GONE, workers=(_worker(), _worker(name="w-2"))),
        {"worker_silent": "once it is dead, mend the cause, then: holdfast replay"},
    ),
    (
        _job(JobState.RUNNING, lease_until_us=NOW - 1, attempts=5),
        SERVED,
        {"lease_expired": "ends it as dead (crashed): this is its last attempt"},
    ),
    (_job(JobState.QUEUED, lost_leases=1), SERVED, {"suspect": "logs"}),
    (_job(JobState.QUEUED, lost_leases=2), SERVED, {"quarantined": "logs"}),
    (_job(JobState.SCHEDULED, run_at_us=NOW + MINUTE), SERVED, {"scheduled": ""}),
    (
        _job(JobState.SCHEDULED, run_at_us=NOW + MINUTE),
        JobFacts(now_us=NOW, paused=True),
        {"scheduled": "", "paused": "resume", "no_worker": "start"},
    ),
    (_job(JobState.SCHEDULED), SERVED, {"next": ""}),
    (_job(JobState.FAILED, run_at_us=NOW + MINUTE, error="no"), SERVED, {"retry_later": "replay"}),
    (_job(JobState.WAITING), SERVED, {"waiting": ""}),
    (_job(JobState.RUNNING, started_at_us=NOW, lease_until_us=NOW + MINUTE), SERVED, {"running": "holdfast cancel"}),
    (_job(JobState.RUNNING, lease_until_us=NOW + MINUTE, cancelling=True), SERVED, {"cancelling": "handler"}),
    (_job(JobState.RUNNING, lease_until_us=NOW - MINUTE), SERVED, {"lease_expired": "maintenance"}),
    (_job(JobState.SUCCEEDED, ended_at_us=NOW), SERVED, {"succeeded": "--force"}),
    (_job(JobState.CANCELLED, ended_at_us=NOW), SERVED, {"cancelled": "holdfast replay"}),
    (_job(JobState.DEAD, reason="max_attempts", **DEAD), SERVED, {"dead_max_attempts": "mend the cause"}),
    (_job(JobState.DEAD, reason="no_handler", **DEAD), SERVED, {"dead_no_handler": "whose application has it"}),
    (_job(JobState.DEAD, reason="payload", **DEAD), SERVED, {"dead_payload": "--payload"}),
    (_job(JobState.DEAD, reason="crashed", **DEAD), SERVED, {"dead_crashed": "memory"}),
    (_job(JobState.DEAD, reason="resource", **DEAD), SERVED, {"dead_resource": "raise the limit"}),
    (_job(JobState.DEAD, reason="sandbox", **DEAD), SERVED, {"dead_sandbox": "holdfast doctor"}),
    (_job(JobState.DEAD, reason="timeout", **DEAD), SERVED, {"dead_timeout": "holdfast show"}),
]


@pytest.mark.parametrize(
    ("job", "known", "expected"), CASES, ids=lambda value: "+".join(value) if type(value) is dict else ""
)
def test_every_reason_has_its_remedy(job: Job, known: JobFacts, expected: dict[str, str]) -> None:
    reasons = list(explain_job(job, known))
    assert [each.code for each in reasons] == list(expected)
    assert all(remedy in each.remedy for each, remedy in zip(reasons, expected.values(), strict=True))
    assert all(each.text for each in reasons)


def _use(*, used: int = 0, free_at_us: int = 0, weight: int = 1, **fields: Any) -> LimitUse:
    """Use of a limit of queue mail by tenant: the fields of its values and of its use."""
    by = fields.pop("by", "args.tenant")
    limit = Limit(
        name="crm",
        queue=None if "task" in fields else "mail",
        by=by,
        task=fields.pop("task", None),
        values=LimitValues(**{key: fields.pop(key) for key in ("concurrency", "rate") if key in fields}),
    )
    return LimitUse(
        limit=limit, value=None if by is None else "acme", weight=weight, used=used, free_at_us=free_at_us, **fields
    )


def _held(use: LimitUse, *, redacted: bool = False, **fields: Any) -> list[Any]:
    known = JobFacts(now_us=NOW, workers=(_worker(),), limits=(use,), redacted=redacted)
    return list(explain_job(_job(JobState.QUEUED, payload='{"tenant":"acme"}', **fields), known))


def test_full_limit_is_explained_with_its_holders() -> None:
    (reason,) = _held(_use(concurrency=2, used=2, holders=(("job-1", "mail"), ("job-2", "mail"))))
    assert (reason.code, reason.text) == (
        "limit",
        "limit crm of queue mail, for args.tenant = acme, has no room: 2 of 2 in use, held by job-1, job-2",
    )
    assert "holdfast limit set crm --concurrency 3" in reason.remedy
    (reason,) = _held(_use(by=None, concurrency=9, used=8, weight=5, holders=(("job-1", "mail"),), has_more=True))
    assert "8 of 9 in use, held by job-1 and others, and it takes 5" in reason.text
    assert "holdfast limit set crm --concurrency 13" in reason.remedy


def test_missing_tokens_and_pauses_are_explained_with_their_end() -> None:
    (reason,) = _held(_use(rate=10, free_at_us=NOW + MINUTE))
    assert "has no token until 2031-01-01 00:01" in reason.text
    assert "in 1m" in reason.text
    assert "10/s" in reason.text
    assert "holdfast limit set crm --rate" in reason.remedy
    for values in ({"concurrency": 3}, {"rate": 10}):
        (reason,) = _held(_use(**values, free_at_us=NOW + MINUTE, paused=True))
        assert "is paused until 2031-01-01 00:01" in reason.text
        assert "holdfast limit resume crm acme" in reason.remedy
    (reason,) = _held(_use(rate=10, weight=3))
    assert "fewer than the 3 tokens" in reason.text


def test_each_limit_that_holds_a_job_is_explained() -> None:
    reasons = _held(_use(concurrency=1, used=1, rate=10, free_at_us=NOW + MINUTE))
    assert [each.code for each in reasons] == ["limit", "limit"]


def test_job_that_waits_for_its_turn_is_explained_so() -> None:
    (reason,) = _held(_use(concurrency=3, used=1))
    assert reason.code == "turn"
    assert "take turns" in reason.text
    assert "holdfast limit set crm --share" in reason.remedy
    known = JobFacts(now_us=NOW, workers=(_worker(),), limits=(_use(concurrency=3),), ahead=4)
    (reason,) = explain_job(_job(JobState.QUEUED, payload='{"tenant":"acme"}'), known)
    assert "4 jobs of its key args.tenant = acme go first" in reason.text


def test_hidden_key_is_not_shown() -> None:
    for payload in ('{"tenant":"[redacted]"}', '"[redacted]"', "spoiled"):
        known = JobFacts(now_us=NOW, workers=(_worker(),), limits=(_use(concurrency=1, used=1),))
        (reason,) = explain_job(_job(JobState.QUEUED, payload=payload), known)
        assert "acme" not in reason.text
        assert "args.tenant = [redacted]" in reason.text


def test_discreet_explanation_of_a_task_limit_names_no_jobs() -> None:
    use = _use(task="work", concurrency=1, used=1, holders=(("job-1", "other"),))
    (reason,) = _held(use, redacted=True)
    assert "job-1" not in reason.text
    (reason,) = _held(use)
    assert "job-1" in reason.text


def test_job_under_limits_is_explained_from_the_store(cli: Cli) -> None:
    cli.run("limit", "add", "crm", "--queue", "default", "--by", "args.tenant", "--concurrency", "1")
    running, waiting, _, other = [
        cli.run("enqueue", "work", f'{{"tenant":"{tenant}"}}').strip() for tenant in ("a", "a", "a", "b")
    ]
    _register_worker()
    _claim_one()
    (reason,) = cli.json("why", waiting)["reasons"]
    assert reason["code"] == "limit"
    assert f"args.tenant = a, has no room: 1 of 1 in use, held by {running}" in reason["text"]
    assert [each["code"] for each in cli.json("why", other)["reasons"]] == ["turn"]
    cli.run("limit", "set", "crm", "--concurrency", "2", "--rate", "1/h")
    cli.run("limit", "pause", "crm", "a", "--for", "1h")
    (reason,) = cli.json("why", waiting)["reasons"]
    assert "is paused until" in reason["text"]
    assert reason["remedy"].endswith("holdfast limit resume crm a")
    cli.run("limit", "resume", "crm", "a")
    assert [each["code"] for each in cli.json("why", waiting)["reasons"]] == ["turn"]


def test_job_behind_a_heavy_one_is_explained_with_what_makes_them_start(cli: Cli) -> None:
    cli.run("limit", "add", "pages", "--queue", "default", "--concurrency", "2", "--weight", "args.n")
    _, heavy, light, last = [cli.run("enqueue", "work", f'{{"n":{n}}}').strip() for n in (1, 5, 1, 1)]
    _register_worker()
    _claim_one()
    (reason,) = cli.json("why", light)["reasons"]
    assert reason["text"].endswith("and 1 job under its limits goes first")
    assert f"what holds back the first of them holds back this one: holdfast why {heavy}" in reason["remedy"]
    (reason,) = cli.json("why", last)["reasons"]
    assert reason["text"].endswith("and 2 jobs under its limits go first")
    assert f"holdfast why {heavy}" in reason["remedy"]
    (reason,) = cli.json("why", heavy)["reasons"]
    cli.run(*reason["remedy"].partition("holdfast ")[2].split())
    assert [each["code"] for each in cli.json("why", heavy)["reasons"]] == ["turn"]
    _claim_one()
    assert cli.json("show", heavy)["state"] == "running"


def _claim_one() -> None:
    from holdfast import Holdfast
    from holdfast.stores.base import ClaimRequest

    app = Holdfast()

    async def claim() -> None:
        request = ClaimRequest("w-1", {"*": 1}, limit=1, lease_for=timedelta(minutes=1))
        assert len((await (await app.open_store()).queueing.claim(request)).jobs) == 1

    app.run_blocking(claim())
    app.sync.close()


def test_misspelt_task_is_explained_with_the_nearest_name() -> None:
    known = JobFacts(now_us=NOW, workers=(_worker("*"),), tasks=frozenset({"work.done", "other"}))
    reason, _ = explain_job(_job(JobState.QUEUED, task="work.dome"), known)
    assert reason.text == (
        "task work.dome is not registered in this application; did you mean work.done? "
        "worker w-1, which serves its queue, may have it"
    )
    assert "holdfast cancel 0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77" in reason.remedy


def test_silent_worker_is_explained_with_the_evidence() -> None:
    (reason,) = explain_job(_job(JobState.QUEUED), SILENT)
    assert reason.text == "worker w-1 was last heard from 20s ago: if it died, no other worker takes the job"
    (reason,) = explain_job(_job(JobState.RUNNING, lease_until_us=NOW + MINUTE), GONE)
    assert (
        "was last heard from 0s ago, and this host has no process 1: if that worker died, the job runs" in reason.text
    )


def test_workers_of_other_queues_are_counted_in_words() -> None:
    (reason,) = explain_job(_job(JobState.QUEUED), JobFacts(now_us=NOW, workers=(_worker("other"),)))
    assert reason.text == "no living worker serves queue mail; 1 living worker serves other queues or is stopping"


def test_discreet_explanation_mentions_no_other_queues() -> None:
    (reason,) = explain_job(_job(JobState.QUEUED), JobFacts(now_us=NOW, workers=(_worker("other"),), redacted=True))
    assert reason.text == "no living worker serves queue mail"
    busy = JobFacts(now_us=NOW, workers=(_worker("*", running=2),), redacted=True)
    assert next(each.text for each in explain_job(_job(JobState.QUEUED), busy)) == "every worker of its queue is busy"


def test_worker_with_a_limited_key_serves_its_patterns() -> None:
    assert serves_queue(_worker("mail.*,news"), "mail.in")
    assert not serves_queue(_worker("mail.*,news"), "secret")


def test_a_worker_that_was_killed_is_missed_at_once(cli: Cli) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    job_id = cli.run("enqueue", "work").strip()
    _register_worker(host=socket.gethostname(), pid=ended.pid)
    (reason,) = cli.json("why", job_id)["reasons"]
    assert reason["code"] == "worker_silent"
    assert f"this host has no process {ended.pid}" in reason["text"]
    _register_worker("w-2", host=socket.gethostname(), pid=os.getpid())
    assert [each["code"] for each in cli.json("why", job_id)["reasons"]] == ["next"]


def test_a_worker_whose_queues_cannot_be_read_serves_none() -> None:
    assert not serves_queue(_worker("???"), "mail")


def test_job_failed_by_a_worker_of_another_application_is_explained(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work").strip()
    cli.end(job_id, Failed(error="no task 'work' is registered", reason=Reason.NO_HANDLER))
    _register_worker()
    assert [each["code"] for each in cli.json("why", job_id)["reasons"]] == ["retry_later", "no_handler"]
    assert "worker worker-1 took it, and has no task work" in cli.run("why", job_id)


def test_remedy_names_the_application_that_was_given(cli: Cli) -> None:
    target = cli.write_jobs()
    job_id = cli.run("enqueue", "work", "--app", target).strip()
    assert f"remedy: holdfast --app {target} worker start --queues default" in cli.run("why", "-A", target, job_id)
    for words in ([], ["--app", "none"]):
        assert "remedy: holdfast worker start --queues default" in cli.run("why", job_id, *words)


def test_the_place_in_line_counts_what_goes_first(cli: Cli) -> None:
    for priority in ("5", "0", "-5"):
        cli.run("enqueue", "work", "--priority", priority)
    last = cli.run("enqueue", "work", "--key", "k").strip()
    cli.run("enqueue", "work", "--queue", "other", "--priority", "9")
    cli.claim(cli.run("enqueue", "work", "--priority", "100").strip())
    assert [each["code"] for each in cli.json("why", last)["reasons"]] == ["no_worker"]
    _register_worker()
    (reason,) = cli.json("why", "key:k")["reasons"]
    assert reason["code"] == "behind"
    assert "behind 2 jobs of queue default" in reason["text"]
    assert "remedy: start more workers" in cli.run("why", "key:k")


def _register_worker(name: str = "w-1", *, host: str = "here", pid: int = 1) -> None:
    from holdfast import Holdfast

    app = Holdfast()

    async def beat() -> None:
        heartbeat = WorkerHeartbeat(worker=name, host=host, pid=pid, queues="*", concurrency=2)
        await (await app.open_store()).queueing.heartbeat(heartbeat, [], lease_for=timedelta(minutes=1))

    app.run_blocking(beat())
    app.sync.close()


def test_live_workers_are_listed_and_can_be_stopped(cli: Cli) -> None:
    cli.run("enqueue", "work")
    _register_worker()
    (worker,) = cli.json("worker", "list")["workers"]
    assert (worker["id"], worker["state"], worker["queues"]) == ("w-1", "working", "*")
    assert cli.json("worker", "stop", "w-1", "--drain") == {"asked": ["w-1"], "drain": True}
    assert cli.json("worker", "list")["workers"][0]["state"] == "draining"
    assert "no living worker w-2" in cli.fail("worker", "stop", "w-2", code=1)
    assert "still at work" in cli.fail("worker", "stop", "--wait-for", "1ms", code=75)
