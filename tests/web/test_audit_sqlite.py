"""The record of changes: what is in it, that it is a chain, and what happens where it cannot be written."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import ConfigError, Unavailable
from holdfast.core.events import ApiChange, ApiSubmission, AuditFailed, KeyRefused
from holdfast.telemetry.audit_file import AuditBroken, AuditFile, add, chain_entry, verify
from holdfast.web.asgi import OPERATIONS
from holdfast.web.audit import _summary
from tests.interfaces.cli import ROOT, Cli
from tests.web.client import UNKNOWN_ID, Api
from tests.web.keyed import Keys, ask, id_of, refused

CANARY = "marigold-thunder-whistling-oxbow"


class Audited:
    """An API with keys and an audit file."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keys(folder)
        self.file = folder / "audit.jsonl"
        self.api = Api(f"sqlite:///{folder}/jobs.db", keys_file=str(self.keys.path), audit_file=str(self.file))
        self.events_seen: list[Any] = []
        self.api.app.events.subscribe(self.events_seen.append, ApiChange, ApiSubmission, AuditFailed, KeyRefused)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        return ask(self.api, self.keys.spare, method, path, body, **headers)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Every entry, of a file that is whole."""
        verify(self.file)
        return [json.loads(line)["entry"] for line in self.file.read_text().splitlines()]

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """What was asked for, of each call of this operation."""
        return [entry.get("asked", {}) for entry in self._steps(operation, "asked")]

    def done(self, operation: str) -> list[dict[str, Any]]:
        """How each call of this operation ended."""
        return self._steps(operation, "done")

    def _steps(self, operation: str, step: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if (entry["operation"], entry["step"]) == (operation, step)]


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[Audited]:
    audited = Audited(tmp_path)
    with audited.api:
        yield audited


def test_every_change_is_recorded_before_and_after(audited: Audited) -> None:
    job = audited.ask("POST", "/v1/jobs", {"task": "work", "payload": {"x": CANARY}}, **{"x-request-id": "r-1"}).json()
    audited.ask("POST", "/v1/jobs/cancel", {"ids": [job["id"]], "dry_run": False})
    audited.ask("DELETE", f"/v1/jobs/{UNKNOWN_ID}")
    audited.ask("POST", "/v1/queues/default/pause")
    audited.ask("GET", "/v1/jobs")
    entries = audited.entries
    who = id_of(audited.keys.spare)
    assert {entry["who"] for entry in entries} == {who}
    assert [(entry["step"], entry["operation"], entry.get("status")) for entry in entries] == [
        ("asked", "submit_job", None),
        ("done", "submit_job", 201),
        ("asked", "cancel_jobs", None),
        ("done", "cancel_jobs", 200),
        ("asked", "delete_job", None),
        ("done", "delete_job", 404),
        ("asked", "pause_queue", None),
        ("done", "pause_queue", 200),
    ]
    first, submitted, asked, done, _, absent, pausing, _ = entries
    assert first["request_id"] == submitted["request_id"] == "r-1"
    assert first["asked"] == {"task": "work"}
    assert (submitted["ids"], submitted["count"]) == ([job["id"]], 1)
    assert asked["asked"] == {"ids": [job["id"]], "dry_run": False}
    assert (done["ids"], done["count"]) == ([job["id"]], 1)
    assert absent["code"] == "not_found"
    assert pausing["target"] == "POST /v1/queues/default/pause"
    assert CANARY not in audited.file.read_text()
    assert [(type(event).__name__, event.status, event.count) for event in audited.events_seen] == [
        ("ApiSubmission", 201, 1),
        ("ApiChange", 200, 1),
        ("ApiChange", 404, 0),
        ("ApiChange", 200, 0),
    ]


def test_dry_run_of_a_backfill_is_recorded_as_no_change(audited: Audited) -> None:
    schedule = {"name": "nightly", "task": "work", "payload": {}, "cron": "0 3 * * *"}
    days = {"start": "2020-01-01T00:00:00Z", "end": "2020-01-03T00:00:00Z"}
    audited.ask("POST", "/v1/schedules", schedule)
    for is_dry in (True, False):
        audited.ask("POST", "/v1/schedules/nightly/backfill", {**days, "dry_run": is_dry})
    assert audited.asked("backfill_schedule") == [{"dry_run": is_dry, **days} for is_dry in (True, False)]
    assert [entry["count"] for entry in audited.done("backfill_schedule")] == [0, 2]


def test_entries_are_short_whatever_comes(audited: Audited) -> None:
    big = {"task": "work", "payload": {"x": CANARY * 40_000}}  # over 1 MiB
    assert audited.ask("POST", "/v1/jobs", big).status_code == 413
    assert audited.ask("POST", "/v1/jobs", {"task": "w" * 100_000, "payload": {}}).status_code == 422
    assert audited.ask("POST", "/v1/jobs/cancel", {"ids": ["x" * 600] * 1000}).status_code == 422
    assert audited.ask("POST", "/v1/jobs/batch", {"jobs": [{"task": "work", "payload": {}}] * 1000}).status_code == 201
    audited.ask("POST", "/v1/queues/default/resume")  # what waits for no file is in it by now
    lines = audited.file.read_text().splitlines()
    assert max(map(len, lines)) < 12_000
    steps = [(entry["operation"], entry["step"], entry.get("status")) for entry in audited.entries]
    assert ("submit_job", "refused", 413) in steps
    [batch] = [entry for entry in audited.entries if entry["operation"] == "submit_jobs" and entry["step"] == "done"]
    assert (batch["count"], len(batch["ids"])) == (1000, 50)


def test_large_answers_are_recorded_with_their_ids_too(audited: Audited) -> None:
    large, small = ({"task": "work", "payload": {"x": "x" * size}} for size in (262_100, 1000))
    first = audited.ask("POST", "/v1/jobs", large)
    assert len(first.content) > 256 * 1024
    assert [(entry["ids"], entry["count"]) for entry in audited.done("submit_job")] == [([first.json()["id"]], 1)]
    audited.ask("POST", "/v1/jobs/batch", {"jobs": [small] * 59})
    claimed = audited.ask("POST", "/v1/claims", {"worker": "w", "limit": 60}).json()["jobs"]
    [claim] = audited.done("claim_jobs")
    assert (claim["ids"], claim["count"]) == ([job["id"] for job in claimed[:50]], 60)
    assert [(event.operation, event.count) for event in audited.events_seen][-1] == ("claim_jobs", 60)


def test_repeated_submission_is_recorded_as_no_change(audited: Audited) -> None:
    job = {"task": "work", "payload": {}, "key": "k"}
    for _ in range(2):
        audited.ask("POST", "/v1/jobs", job)
        audited.ask("POST", "/v1/jobs/batch", {"jobs": [job, {"task": "work", "payload": {}}]})
    assert [(entry["status"], entry["count"]) for entry in audited.done("submit_job")] == [(201, 1), (200, 0)]
    assert [entry["count"] for entry in audited.done("submit_jobs")] == [1, 1]


def test_settlements_are_recorded_with_request_and_outcome(audited: Audited) -> None:
    ids = [audited.ask("POST", "/v1/jobs", {"task": "work", "payload": {}}).json()["id"] for _ in range(4)]
    claimed = audited.ask("POST", "/v1/claims", {"worker": "w", "limit": 4}).json()["jobs"]
    tokens = {job["id"]: job["token"] for job in claimed}
    error = {"message": CANARY}
    settlements = [
        {"token": tokens[ids[0]], "outcome": "succeeded", "result": CANARY},
        {"token": tokens[ids[1]], "outcome": "succeeded"},
        {"token": tokens[ids[2]], "outcome": "dead", "error": error},
    ]
    audited.ask("POST", "/v1/claims/settle", {"worker": "w", "settlements": settlements[:1]})
    audited.ask("POST", "/v1/claims/settle", {"worker": "w", "settlements": settlements})
    line = {"worker": "w", "token": tokens[ids[3]], "lines": [{"number": 1, "text": CANARY}]}
    audited.ask("POST", "/v1/claims/lines", line)
    audited.ask("POST", "/v1/claims/leave", {"worker": "w", "leases": list(tokens.values())})
    settled, leaving = audited.done("settle_jobs")[-1], audited.done("deregister_worker")[-1]
    assert audited.asked("settle_jobs")[-1] == {
        "worker": "w",
        "settlements_count": 3,
        "settlements": {"succeeded": 2, "dead": 1},
    }
    assert (settled["ids"], settled["count"], settled["verdicts"]) == (ids[1:3], 2, {"repeated": 1, "accepted": 2})
    assert audited.asked("append_log_lines")[-1] == {"worker": "w", "lines_count": 1}
    assert audited.done("append_log_lines")[-1]["ids"] == ids[3:]
    assert audited.asked("deregister_worker")[-1] == {"worker": "w", "leases_count": 4}
    assert (leaving["ids"], leaving["count"]) == (ids[3:], 1)
    assert CANARY not in audited.file.read_text()


def test_settlements_that_make_no_sense_are_recorded_all_the_same(audited: Audited) -> None:
    for outcome in (["succeeded"], {}, "x" * 9000, 5, None):
        body = {"worker": "w", "settlements": [{"token": "a", "outcome": outcome}]}
        assert audited.ask("POST", "/v1/claims/settle", body).status_code == 422
        assert audited.asked("settle_jobs")[-1] == {"worker": "w", "settlements_count": 1, "settlements": {}}
    assert audited.ask("POST", "/v1/jobs", {"task": "work", "lines": 5, "settlements": 5}).status_code == 422


def test_operation_is_recorded_with_all_changes_and_edits(audited: Audited) -> None:
    jobs = audited.ask("POST", "/v1/jobs/batch", {"jobs": [{"task": "work", "payload": {}}] * 3}).json()["jobs"]
    ids = [job["id"] for job in jobs]
    audited.ask("POST", "/v1/jobs/cancel", {"ids": [*ids, ids[0], UNKNOWN_ID]})
    audited.ask("POST", f"/v1/jobs/{ids[0]}/replay", {"payload": {"x": CANARY}})
    audited.ask("POST", f"/v1/jobs/{ids[1]}/replay")
    audited.ask("POST", "/v1/jobs/replay", {"all": True, "dry_run": True, "rate": "1/s", "after": 5})
    audited.ask("POST", f"/v1/jobs/{ids[0]}/cancel")
    cancelled, (edited, plain), dry = (
        audited.done("cancel_jobs")[0],
        audited.done("replay_job"),
        audited.done("replay_jobs")[0],
    )
    assert (cancelled["ids"], cancelled["count"]) == (ids, 3)
    assert audited.asked("replay_job") == [{"payload_edited": True}, {}]
    assert [(each["ids"], each["count"]) for each in (edited, plain)] == [(ids[:1], 1), (ids[1:2], 1)]
    assert audited.asked("replay_jobs")[0] == {"all": True, "dry_run": True, "rate": "1/s", "after": 5}
    assert (dry["count"], dry.get("ids")) == (0, None)
    assert audited.done("cancel_job")[0]["ids"] == ids[:1]
    assert CANARY not in audited.file.read_text()


def test_every_field_but_the_contents_of_jobs_is_recorded(audited: Audited) -> None:
    contents = {"payload", "metadata", "value"}
    elsewhere = {"token", "jobs", "leases", "lines", "settlements", "shares", "values"}  # counted, or a secret
    reports = {"tasks", "wait", "lease", "host", "pid", "running", "succeeded", "failed", "version", "memory"}
    callbacks = {"on_success", "on_failure", "on_end"}
    for operation in OPERATIONS:
        if operation.method == "GET" or operation.quiet or operation.body is None:
            continue
        body: dict[str, Any] = {field.name: [] for field in operation.body.fields}
        missing = body.keys() - _summary(body, operation).keys() - contents - elsewhere - callbacks
        assert missing <= (reports if operation.name == "claim_jobs" else set()), operation.name


def test_pause_of_a_limit_is_recorded_with_its_span(audited: Audited) -> None:
    limit = {"name": "crm", "task": "work", "by": "args.customer", "rate": "5/s"}
    assert audited.ask("POST", "/v1/limits", limit).status_code == 201
    pause = {"for": "10m", "values": [CANARY]}
    assert audited.ask("POST", "/v1/limits/crm/pause", pause).status_code == 200
    assert audited.asked("pause_limit") == [{"for": "PT600S", "values_count": 1}]
    assert CANARY not in audited.file.read_text()


def test_edit_is_recorded_without_its_payload(audited: Audited) -> None:
    job = audited.ask("POST", "/v1/jobs", {"task": "work", "payload": {}}).json()
    changes = {"priority": 5, "queue": "mail", "delay": 60, "expires": "1h", "payload": {"x": CANARY}}
    assert audited.ask("PATCH", f"/v1/jobs/{job['id']}", changes).status_code == 200
    audited.ask("PATCH", f"/v1/jobs/{UNKNOWN_ID}", {"priority": 5})

    asked = {name: value for name, value in changes.items() if name != "payload"} | {"payload_edited": True}
    assert audited.asked("edit_job") == [asked, {"priority": 5}]
    done, refused_entry = audited.done("edit_job")
    assert (done["status"], done["ids"]) == (200, [job["id"]])
    assert (refused_entry["status"], refused_entry["code"]) == (404, "not_found")
    assert CANARY not in audited.file.read_text()


def test_stop_request_is_recorded_when_one_worker_is_missing(audited: Audited) -> None:
    audited.ask("POST", "/v1/claims", {"worker": "w"})
    there = f"{id_of(audited.keys.spare)}.w"
    assert audited.ask("POST", "/v1/workers/stop", {"workers": [there, "absent"]}).status_code == 404
    [stopping] = audited.done("stop_workers")
    assert (stopping["code"], stopping["ids"], stopping["count"]) == ("not_found", [there], 1)


def test_refused_caller_is_reported_and_recorded_if_its_key_is_good(audited: Audited) -> None:
    reader = audited.keys.make("read")
    refused(ask(audited.api, None, "POST", "/v1/jobs", {}), 401, "unauthorized")
    refused(ask(audited.api, reader, "POST", "/v1/jobs", {}), 403, "forbidden")
    refused(ask(audited.api, reader, "POST", "/v1/claims/extend", {}), 403, "forbidden")
    audited.ask("POST", "/v1/queues/default/resume")  # what waits for no file is in it by now
    assert [(event.who, event.problem) for event in audited.events_seen if isinstance(event, KeyRefused)] == [
        ("anonymous", "no key was shown"),
        (id_of(reader), "submit_job needs the scope submit"),
        (id_of(reader), "extend_leases needs the scope work"),
    ]
    steps = [(each["step"], each["who"], each["operation"], each.get("code")) for each in audited.entries]
    assert steps[:-2] == [("refused", id_of(reader), "submit_job", "forbidden")]


@pytest.mark.parametrize("trouble", ["folder", "no audit file", "locked"])
def test_without_a_record_nothing_is_changed(audited: Audited, trouble: str, tmp_path: Path) -> None:
    job = {"task": "work", "payload": {}}
    with contextlib.ExitStack() as stack:
        if trouble == "folder":
            audited.file.unlink()
            audited.file.mkdir()
        elif trouble == "no audit file":
            audited.file.write_text("notes\n")
        else:
            other = stack.enter_context(audited.file.open("w"))
            fcntl.flock(other, fcntl.LOCK_EX)
        for _ in range(2):
            answer = audited.ask("POST", "/v1/jobs", job)
            refused(answer, 503, "audit_unavailable")
            assert answer.headers["retry-after"]
        assert audited.ask("GET", "/v1/jobs").json()["jobs"] == []
    assert [type(event) for event in audited.events_seen if not isinstance(event, ApiSubmission)] == [AuditFailed]
    assert "audit" in audited.api.get("/health")["warnings"][0]
    if trouble == "folder":
        audited.file.rmdir()
    elif trouble == "no audit file":
        audited.file.unlink()
    assert audited.ask("POST", "/v1/jobs", job).status_code == 201
    assert "warnings" not in audited.api.get("/health")
    assert {"asked", "done"} == {entry["step"] for entry in audited.entries}


@pytest.mark.parametrize("name", ["nowhere/audit.jsonl", "folder", "keys.toml", "notes.txt"])
def test_unwritable_audit_file_is_refused_at_start(tmp_path: Path, name: str) -> None:
    Keys(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("notes\n")
    given = {"keys_file": str(tmp_path / "keys.toml"), "audit_file": str(tmp_path / name)}
    before = (tmp_path / "keys.toml").read_bytes()
    with pytest.raises(ConfigError, match="audit_file"):
        Api(f"sqlite:///{tmp_path}/jobs.db", **given)
    assert (tmp_path / "keys.toml").read_bytes() == before


def test_job_deleted_by_key_is_recorded_by_its_id(audited: Audited) -> None:
    job = audited.ask("POST", "/v1/jobs", {"task": "work", "payload": {}, "key": "r1"}).json()
    audited.ask("POST", "/v1/jobs/cancel", {"ids": [job["id"]]})
    assert audited.ask("DELETE", "/v1/jobs/key:r1").status_code == 204
    last = audited.entries[-1]
    assert (last["step"], last["ids"], last["count"]) == ("done", [job["id"]], 1)
    assert audited.events_seen[-1].ids == [job["id"]]


# ── the chain ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _chain(path: Path, count: int = 5) -> list[bytes]:
    last = ""
    for number in range(count):
        last = add(path, [b'{"number":%d}' % number], last, 1)
    return path.read_bytes().splitlines(keepends=True)


def test_tampering_breaks_the_hash_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = _chain(path)
    whole = verify(path)
    assert (whole.entries, whole.found) == (5, True)
    tampered = {
        2: [lines[0], lines[1].replace(b'"number":1', b'"number":7'), *lines[2:]],
        3: [lines[0], lines[1], *lines[3:]],
        4: [*lines[:3], lines[1], *lines[3:]],
        5: [*lines[:4], lines[4].strip()],
        1: [b"notes\n", *lines],
    }
    for place, given in tampered.items():
        path.write_bytes(b"".join(given))
        with pytest.raises(AuditBroken, match=f":{place}: "):
            verify(path)
    path.write_bytes(b"".join(lines[3:]))  # taken out at the front
    before = json.loads(lines[2])["hash"]
    for wanted in (None, whole.last):
        with pytest.raises(AuditBroken, match=f":1: it follows {before}: say --after"):
            verify(path, wanted)
    assert verify(path, before, before).found
    path.write_bytes(b"".join(lines))
    with pytest.raises(AuditBroken, match=":1: it follows nothing"):
        verify(path, after=before)
    path.write_bytes(b"")
    with pytest.raises(AuditBroken, match="no lines"):
        verify(path)
    path.write_bytes(b"".join(lines[:4]))  # the end cut off: whole in itself
    assert verify(path).entries == 4
    assert not verify(path, whole.last).found


def test_truncated_tail_is_cut_off_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = _chain(path)
    path.write_bytes(b"".join(lines) + lines[0][:40])
    add(path, [b'{"number":5}'], "", 1)
    entries = [json.loads(line)["entry"] for line in path.read_text().splitlines()]
    assert entries[-2:] == [{"operation": "audit.torn", "bytes": 40}, {"number": 5}]
    assert verify(path).entries == 7


def test_rotated_file_is_followed_by_one_that_continues(tmp_path: Path) -> None:
    async def use() -> None:
        file = AuditFile(tmp_path / "audit.jsonl")
        await file.add(b"{}")
        (tmp_path / "audit.jsonl").rename(tmp_path / "audit.1")
        await file.add(b"{}")

    asyncio.run(use())
    first = json.loads((tmp_path / "audit.1").read_text())
    assert json.loads((tmp_path / "audit.jsonl").read_text())["previous"] == first["hash"]


def test_shared_file_rotation_continues_after_its_last_line(tmp_path: Path) -> None:
    path, aside = tmp_path / "audit.jsonl", tmp_path / "audit.1"

    async def use() -> None:
        file, other = AuditFile(path), AuditFile(path)
        for each in (file, other, other):
            await each.add(b"{}")
        path.rename(aside)
        for each in (file, other, file):
            await each.add(b"{}")

    asyncio.run(use())
    assert verify(path, after=verify(aside).last).entries == 3


def test_rotation_waits_for_a_writer_of_the_old_file(tmp_path: Path) -> None:
    path, aside = tmp_path / "audit.jsonl", tmp_path / "audit.1"

    async def use() -> None:
        file = AuditFile(path, timeout=30)
        await file.add(b"{}")
        with path.open("r+b") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            path.rename(aside)
            adding = asyncio.create_task(file.add(b"{}"))
            while not path.exists():  # noqa: ASYNC110 - the file is made by a thread
                await asyncio.sleep(0.01)
            first = json.loads(other.readline())["hash"]
            other.write(chain_entry(first, b"{}")[1])
        await adding

    asyncio.run(use())
    assert verify(aside).entries == 2
    assert verify(path, after=verify(aside).last).entries == 1


def test_several_processes_add_to_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    program = (
        "import asyncio, sys, pathlib\n"
        "from holdfast.telemetry.audit_file import AuditFile\n"
        "async def main():\n"
        "    file = AuditFile(pathlib.Path(sys.argv[1]), timeout=30)\n"
        "    for _ in range(5):\n"
        "        await asyncio.gather(*[file.add(b'{}') for _ in range(20)])\n"
        "asyncio.run(main())\n"
    )
    words = [sys.executable, "-c", program, str(path)]
    processes = [subprocess.Popen(words, env={"PYTHONPATH": str(ROOT)}) for _ in range(3)]
    assert [process.wait(50) for process in processes] == [0, 0, 0]
    assert verify(path).entries == 300


def test_an_entry_that_waits_too_long_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"

    async def use() -> None:
        file = AuditFile(path, timeout=0.2)
        with pytest.raises(Unavailable):
            await file.add(b'{"late":true}')

    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        asyncio.run(use())
    assert b"late" not in path.read_bytes()


def test_the_command_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = _chain(tmp_path / "audit.jsonl")
    cli, last = Cli(tmp_path), json.loads(lines[-1])["hash"]
    assert cli.run("audit", "verify", "audit.jsonl") == f"5 lines, whole; the last hash is {last}\n"
    assert cli.json("audit", "verify", "audit.jsonl", "--expect", last) == {"entries": 5, "last": last}
    assert "missing" in cli.fail("audit", "verify", "audit.jsonl", "--expect", "0" * 64, code=1)
    (tmp_path / "audit.jsonl").write_bytes(b"".join(lines[1:3] + lines[4:]))
    first = json.loads(lines[0])["hash"]
    assert f":1: it follows {first}" in cli.fail("audit", "verify", "audit.jsonl", code=1)
    assert "audit.jsonl:3: " in cli.fail("audit", "verify", "audit.jsonl", "--after", first, code=1)
    assert "audit_file" in cli.fail("audit", "verify", code=78)
