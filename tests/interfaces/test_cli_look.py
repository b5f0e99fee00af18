"""status, list, show, watch, doctor: what they print for people and for programs."""

from __future__ import annotations

import asyncio
import json
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest

from holdfast import Holdfast, JobState
from holdfast.cli.inspect import print_queues
from holdfast.cli.output import Column, as_json, fitting_columns
from holdfast.cli.watch_tag import TagProgress, describe_progress
from holdfast.core.job_logs import LogBatch, NewLine
from holdfast.core.lifecycle import Failed, Lost, Released, Succeeded
from holdfast.core.models import QueueInfo, Reason
from holdfast.core.steps import NewStep
from holdfast.views.formatting import format_decimal, format_span, safe_text
from holdfast.worker.executors import resource_limits
from holdfast.worker.sandbox import plan
from tests.interfaces.cli import Cli

INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
EVIL = "\x1b[31mred\x1b[0m\r\x07\u202etxt\x9b2J\u2028end"


def test_show_labels_the_former_run_of_a_replayed_job(cli: Cli) -> None:
    job_id = cli.dead()
    assert re.search(r"^worker +\S", cli.run("show", job_id), re.MULTILINE)
    cli.run("replay", job_id)
    shown = cli.run("show", job_id)
    assert re.search(r"^last worker +\S", shown, re.MULTILINE)
    assert re.search(r"^last started +\S", shown, re.MULTILINE)
    assert not re.search(r"^(worker|started) ", shown, re.MULTILINE)


def test_rate_has_thousands_separators_and_no_exponent() -> None:
    assert [format_decimal(rate) for rate in (0.25, 99.96, 1020.4, 1_250_000.0)] == [
        "0.25",
        "100",
        "1,020",
        "1,250,000",
    ]
    progress = TagProgress(
        tag="run-7", total=2, ended=1, states=dict.fromkeys(JobState, 0), per_second=1020.0, seconds_left=None
    )
    assert "1,020/s" in describe_progress(progress)


def test_status_counts_by_queue_and_state(cli: Cli) -> None:
    cli.run("enqueue", "work", "--queue", "mail")
    cli.run("enqueue", "work", "--queue", "mail", "--delay", "1h")
    cli.dead()
    status = cli.json("status")
    queues = {each["name"]: each["states"] for each in status["queues"]}
    assert (queues["mail"]["queued"], queues["mail"]["scheduled"], queues["default"]["dead"]) == (1, 1, 1)
    assert status["totals"] == {
        **dict.fromkeys(("waiting", "running", "failed", "succeeded", "cancelled"), 0),
        **dict.fromkeys(("queued", "scheduled", "dead"), 1),
    }
    assert (status["workers"], status["at_least"]) == ([], [])
    assert status["store"] == f"sqlite:///{cli.folder}/holdfast.db"
    text = cli.run("status")
    assert text.startswith(f"store  sqlite:///{cli.folder}/holdfast.db\n")
    assert re.search(r"^mail +1 +- +1 ", text, re.MULTILINE)
    assert "holdfast worker start" in text


def test_a_number_that_may_be_more_has_a_plus(capsys: pytest.CaptureFixture[str]) -> None:
    states = {"queued": 3, "dead": 10_000}
    queue = QueueInfo(
        name="mail",
        paused=False,
        states=states,
        oldest_ready=None,
        at_least=frozenset({JobState.DEAD, JobState.SUCCEEDED}),
        ended_per_second=0.25,
    )
    print_queues([queue], empty="none")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].split() == ["mail", "-", "-", "3", "-", "-", "0+", "10000+", "-", "-", "0.25"]
    assert "a number with + is the least" in printed.err


def test_list_filters_and_pages(cli: Cli) -> None:
    ids = [cli.run("enqueue", f"task{n}", "--queue", f"q{n % 2}", "--tag", f"t{n}").strip() for n in range(4)]
    dead = cli.dead(error="connection refused")

    def listed(*words: str) -> list[str]:
        return [job["id"] for job in cli.json("list", *words)["jobs"]]

    assert listed() == [dead, *reversed(ids)]
    assert listed("--queue", "q1") == [ids[3], ids[1]]
    assert listed("--task", "task0", "--task", "task3") == [ids[3], ids[0]]
    assert listed("--tag", "t2") == [ids[2]]
    assert listed("--state", "dead") == listed("--error", "refused") == listed("--reason", "error") == [dead]
    assert listed("--worker", "worker-1") == [dead]
    assert listed("--since", "1h") == [dead, *reversed(ids)]
    assert listed("--until", "1h") == listed("--since", "2199-01-01T00:00:00Z") == []
    page = cli.json("list", "--limit", "2")
    assert [job["id"] for job in page["jobs"]] == [dead, ids[3]]
    assert listed("--limit", "2", "--cursor", page["cursor"]) == [ids[2], ids[1]]
    shown = cli.invoke("list", "--limit", "2")
    assert f"--cursor {page['cursor']}" in shown.stderr
    assert dead in shown.stdout


def test_show_prints_the_whole_history(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work", '{"n": 1}', "--key", "k", "--tag", "t", "--metadata", '{"by": "me"}').strip()
    cli.end(job_id, Failed(error="ValueError: no", traceback="Traceback: line 1\n  line 2"))
    cli.run("replay", job_id)
    cli.end(job_id, Succeeded('{"total": 3}'))
    document = cli.json("show", job_id)
    (attempt,) = document["history"]
    assert (attempt["attempt"], attempt["state"], attempt["reason"]) == (1, "failed", "error")
    assert (attempt["error"], attempt["traceback"]) == ("ValueError: no", "Traceback: line 1\n  line 2")
    assert (document["state"], document["result"], document["attempts"]) == ("succeeded", {"total": 3}, 1)
    assert all(INSTANT.fullmatch(document[name]) for name in ("created_at", "run_at", "started_at", "ended_at"))
    text = cli.run("show", job_id)
    for part in (
        "ValueError: no",
        "    Traceback: line 1\n      line 2",
        '"total": 3',
        '"by": "me"',
        "worker-1",
        "took",
    ):
        assert part in text


def test_show_names_the_outcome_of_an_attempt_and_not_the_state_of_its_job(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work").strip()
    cli.end(job_id, Lost())
    assert cli.state(job_id) == "queued"
    assert re.search(r"attempt 1, ended .*: crashed$", cli.run("show", job_id), re.MULTILINE)
    cli.end(job_id, Failed(error="no"))
    assert re.search(r"attempt 2, ended .*: failed \(error\)$", cli.run("show", job_id), re.MULTILINE)


def test_misspelt_state_is_answered_with_the_nearest(cli: Cli) -> None:
    assert "did you mean dead?" in cli.fail("list", "--state", "ded", code=2)
    assert "did you mean crashed?" in cli.fail("list", "--reason", "crashd", code=2)


def test_show_has_the_log_lines(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work").strip()
    lines = [NewLine(1, timedelta(0), "info", "fetched", '{"rows":3}'), NewLine(2, timedelta(0), "error", EVIL)]
    job, app = cli.claim(job_id), Holdfast()

    async def record() -> list[bool]:
        return await (await app.open_store()).queueing.append_logs([LogBatch(job.lease, lines)])

    assert app.run_blocking(record()) == [True]
    app.sync.close()
    first, second = cli.json("show", job_id)["lines"]
    assert INSTANT.fullmatch(first["at"])
    assert first == {
        "attempt": 1,
        "claims": 1,
        "at": first["at"],
        "level": "info",
        "text": "fetched",
        "fields": {"rows": 3},
    }
    assert (second["level"], second["text"], second["fields"]) == ("error", EVIL, None)
    text = cli.run("show", job_id)
    assert 'attempt 1  info  fetched  {"rows":3}' in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", text)


def test_a_job_is_found_by_id_ulid_and_key(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work", "--key", "a name").strip()
    ulid = cli.json("show", "key:a name")["ulid"]
    assert len(ulid) == 26
    assert {cli.json("show", each)["id"] for each in (job_id, job_id.upper(), ulid, ulid.lower())} == {job_id}


def test_no_such_job_exits_1(cli: Cli) -> None:
    cli.run("migrate")
    assert "there is no job" in cli.fail("show", "key:none", code=1)


def test_nothing_in_a_job_can_drive_the_terminal(cli: Cli) -> None:
    payload = json.dumps({"text": EVIL}, ensure_ascii=False).replace("\x07", "\\u0007")
    job_id = cli.run("enqueue", "work", payload).strip()
    cli.end(job_id, Failed(error=EVIL, retryable=False, traceback=EVIL))
    unsafe = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]")
    for words in (["show", job_id], ["list"], ["dlq", "list"], ["why", job_id], ["watch", job_id]):
        for form in ([], ["--json"]):
            text = cli.invoke(*words, *form).stdout
            assert job_id in text
            assert not unsafe.search(text), (words, form)
    assert cli.json("show", job_id)["payload"] == {"text": EVIL}
    assert cli.json("show", job_id)["error"] == EVIL


def test_watch_prints_a_line_per_change_and_stops(cli: Cli) -> None:
    cli.run("enqueue", "work")
    text = cli.run("watch", "--for", "60ms", "--interval", "20ms")
    assert len(text.splitlines()) == 1
    assert "1 queued" in text
    (line,) = cli.run("watch", "--for", "1ms", "--json").splitlines()
    assert json.loads(line)["totals"]["queued"] == 1


@pytest.mark.parametrize(("outcome", "code"), [(Succeeded(), 0), (Failed(error="no", retryable=False), 1)])
def test_watching_a_job_ends_with_it(outcome: Failed | Succeeded, code: int, cli: Cli) -> None:
    job_id = cli.run("enqueue", "work").strip()
    cli.end(job_id, outcome)
    assert job_id in cli.run("watch", job_id, code=code)


def test_watching_a_job_that_has_not_ended_does_not_exit_0(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = cli.run("enqueue", "work", "--tag", "t").strip()
    assert job_id in cli.run("watch", job_id, "--for", "1ms", code=75)

    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name, words in {"get": [job_id], "count_states": ["--tag", "t"]}.items():
        monkeypatch.setattr(Holdfast, name, interrupted)
        cli.run("watch", *words, code=130)


def test_doctor_finds_nothing_wrong_with_a_new_store(cli: Cli) -> None:
    cli.run("migrate")
    report = cli.json("doctor")
    names = {each["name"] for each in report["findings"]}
    assert report["healthy"] is True
    assert {"durability", "sqlite", "file system", "clock", "settings", "workers"} <= names


def test_doctor_names_what_is_odd_with_a_remedy(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LEESE", "3s")
    cli.run("enqueue", "work", "--queue", "mail")
    cli.run("enqueue", "work")
    cli.run("queue", "pause", "mail")
    warnings = {each["text"]: each["remedy"] for each in cli.json("doctor")["findings"] if each["level"] == "warning"}
    assert any("HOLDFAST_LEESE" in text for text in warnings)
    assert warnings["queue mail is paused and holds 1 job"] == "holdfast queue resume mail"
    assert "holdfast worker start" in warnings["no worker serves queue default, which holds 1 job"]


def test_doctor_names_dead_jobs_and_those_no_worker_can_run(cli: Cli) -> None:
    cli.dead("--queue", "mail")
    first, second = (cli.run("enqueue", "work").strip() for _ in range(2))
    for job_id in (first, second):
        cli.end(job_id, Released("no task 'work' is registered", timedelta(hours=1), Reason.NO_HANDLER))
    report = cli.json("doctor")
    found = {each["text"]: each["remedy"] for each in report["findings"] if each["level"] == "warning"}
    assert report["healthy"] is True
    assert "holdfast dlq replay --queue mail" in found["queue mail has 1 dead job"]
    remedy = found["workers cannot run jobs of task work: no_handler"]
    assert remedy in (f"holdfast why {first}", f"holdfast why {second}")


@pytest.mark.rows("Q69")
def test_doctor_says_which_sandboxes_hold(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.run("migrate")
    monkeypatch.setattr(plan, "probe_mechanism", lambda each: None if each.name == "landlock" else "forbidden here")

    def finding(name: str, *, code: int = 0) -> dict[str, str]:
        (found,) = [each for each in cli.json("doctor", code=code)["findings"] if each["name"] == name]
        return dict(found)

    assert finding("sandbox")["text"] == "namespaces: forbidden here; landlock: holds"
    monkeypatch.setattr(plan, "probe_mechanism", lambda each: "forbidden here")
    assert finding("sandbox")["level"] == "ok"
    monkeypatch.setenv("HOLDFAST_SANDBOX", "strict")
    refused = finding("sandbox", code=1)
    assert (refused["level"], "user.max_user_namespaces" in refused["remedy"]) == ("error", True)
    monkeypatch.delenv("HOLDFAST_SANDBOX")
    assert finding("resource limits")["level"] == "ok"
    monkeypatch.setattr(resource_limits, "PROCESSES", Path("/no-proc"))
    monkeypatch.setenv("HOLDFAST_JOB_MEMORY", "1GiB")
    assert finding("resource limits", code=1)["remedy"] == "run the workers on Linux"


def test_doctor_repairs_on_request(cli: Cli) -> None:
    cli.run("migrate")
    (repaired,) = [each for each in cli.json("doctor", "--repair")["findings"] if each["name"] == "repair"]
    assert (repaired["level"], repaired["text"]) == ("ok", "there was nothing to put right")


def test_doctor_exits_1_where_something_is_an_error(cli: Cli) -> None:
    cli.run("migrate")
    report = cli.json("doctor", "--app", cli.write_jobs("1 / 0"), code=1)
    assert [each["name"] for each in report["findings"] if each["level"] == "error"] == ["application"]


# ── printing ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_safe_text_shows_what_it_replaces() -> None:
    assert safe_text("a\x1b\n\t\u202e\ud800é") == "a\\x1b\\n\\t\\u202e\\ud800é"
    assert safe_text("a\n\tb\r", lines=True) == "a\n\tb\\r"


def test_json_reads_back_whatever_is_escaped() -> None:
    assert json.loads(as_json({"a": EVIL, "b": "\ud800"}, spread=True)) == {"a": EVIL, "b": "\ud800"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5s"), (59, "59s"), (3661, "1h 1m"), (90000, "1d 1h"), (-61, "-1m 1s")]
)
def test_spans_show_their_two_largest_units(seconds: float, text: str) -> None:
    assert format_span(seconds) == text


def test_narrow_terminal_drops_spare_columns_and_keeps_ids_whole() -> None:
    columns = [Column("ID", "id"), Column("TASK"), Column("QUEUE", spare=True), Column("ERROR", spare=True)]
    rows = [["x" * 36, "t" * 60, "q" * 10, "e" * 60]]
    assert fitting_columns(columns, rows, 120) == [0, 1, 2, 3]
    assert fitting_columns(columns, rows, 80) == [0, 1, 2]
    assert fitting_columns(columns, rows, 10) == [0, 1]


def test_what_is_no_terminal_gets_no_colour_and_no_padding(cli: Cli) -> None:
    cli.dead(error="x" * 200)
    text = cli.run("list")
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_stats_report_jobs_workers_and_recent_activity(cli: Cli) -> None:
    cli.dead()
    cli.run("enqueue", "work")
    counts = cli.json("stats", "--minutes", "10")
    assert (counts["counts"]["dead"], counts["counts"]["queued"], counts["at_least"]) == (1, 1, [])
    assert counts["recent"]["counts"] == counts["counts"]
    shown = cli.run("stats")
    assert "In the last 5 minutes" in shown
    assert "none yet" in shown
    assert cli.invoke("stats", "--minutes", "0").exit_code == 2


def test_history_shows_what_ended_by_hour(cli: Cli) -> None:
    cli.dead()

    async def count() -> None:
        async with Holdfast(now=lambda: time.time_ns() // 1000 + 60_000_000) as app:
            await (await app.open_store()).maintenance.count_ended(limit=10)

    asyncio.run(count())
    points = cli.json("stats", "--since", "24h")["points"]
    assert (len(points), sum(point["dead"] for point in points)) == (25, 1)
    shown = cli.run("stats", "--since", "24h")
    assert "SUCCEEDED" in shown
    assert "█" in shown
    assert "since: '40d' is not valid" in cli.invoke("stats", "--since", "40d").stderr


def test_errors_are_listed_in_groups(cli: Cli) -> None:
    for number in range(3):
        job_id = cli.dead(error=f"ValueError: card {number} declined")
    cli.dead(error="KeyError: 'city'")
    document = cli.json("errors")
    assert ([each["dead"] for each in document["groups"]], document["total"]) == ([1, 3], 2)
    group = document["groups"][1]["id"]
    assert re.search(rf"^{group} +3 +0 .*card 2 declined", cli.run("errors"), re.MULTILINE)
    assert "1 more groups" in cli.invoke("errors", "--limit", "1").stderr
    shown = cli.invoke("errors", group)
    assert re.search(rf"^last seen +\S+ \S+Z in job {job_id}$", shown.stdout, re.MULTILINE)
    assert f"holdfast replay --error-group {group}" in shown.stderr
    assert cli.json("errors", group)["dead"] == 3
    assert cli.run("count", "--error-group", group) == "3\n"
    assert "3 jobs" in cli.run("replay", "--error-group", group, "--state", "dead")
    assert "no failed job is in error group" in cli.invoke("errors", group).stderr
    assert "12 hexadecimal digits" in cli.invoke("errors", "all").stderr


def test_show_lists_the_steps_of_a_job(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work").strip()
    job = cli.claim(job_id)

    async def save() -> list[bool]:
        async with Holdfast() as app:
            steps = [
                NewStep(job.lease, name, number, True, result)
                for number, (name, result) in enumerate([("reserve", None), ("charge", '{"card":"4111","cents":5}')], 1)
            ]
            return await (await app.open_store()).workflow.save_steps(steps)

    assert asyncio.run(save()) == [True, True]
    shown = cli.run("show", job_id)
    assert "Steps" in shown
    assert shown.index("reserve  null") < shown.index('charge  {"card":"4111","cents":5}')
    first, second = cli.json("show", job_id)["steps"]
    assert (first["name"], first["number"], first["claims"], first["result"]) == ("reserve", 1, 1, None)
    assert second["result"] == {"card": "4111", "cents": 5}
    (cli.folder / "holdfast.toml").write_text('redacted = ["result.card"]\n', encoding="utf-8")
    assert cli.json("show", job_id)["steps"][1]["result"] == {"card": "[redacted]", "cents": 5}
    assert "4111" not in cli.run("show", job_id)
