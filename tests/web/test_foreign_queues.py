"""A key for some queues: the jobs of others are not there for it, on every store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, JobState
from holdfast.core.history import History, HistoryInterval, HistoryRow
from holdfast.core.models import NewJob, Submitted
from holdfast.stores.forwarding import ForwardingQuery
from holdfast.web.asgi import OPERATIONS
from tests.web.client import UNKNOWN_ID, Api
from tests.web.keyed import Keys, ask, refused

SECRET = "wisteria-quartz-yonder-mulberry"
"""Stands in the foreign job, and may stand in no answer."""


NOT_OURS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/jobs", {"task": "work", "payload": {}, "queue": "vault"}),
    ("POST", "/v1/jobs", {"task": "work", "payload": {}}),
    ("POST", "/v1/jobs/batch", {"jobs": [{"task": "work", "payload": {}, "queue": "vault"}]}),
    ("GET", "/v1/jobs", None),
    ("GET", "/v1/jobs?queue=vault", None),
    ("POST", "/v1/jobs/cancel", {"all": True}),
    ("POST", "/v1/jobs/delete", {"filter": {"queue": "vault"}}),
    ("POST", "/v1/jobs/replay", {"filter": {"task": ["work"]}}),
    ("GET", "/v1/errors?queue=vault", None),
    ("GET", "/v1/queues/vault", None),
    ("GET", "/v1/queues/mailbox", None),
    ("GET", "/v1/queues/vault/dead", None),
    ("POST", "/v1/queues/vault/dead/replay", {}),
    ("POST", "/v1/queues/vault/pause", None),
    ("POST", "/v1/queues/vault/resume", None),
    ("GET", "/v1/workers", None),
    ("POST", "/v1/workers/stop", {}),
    ("GET", "/v1/faults", None),
    ("POST", "/v1/faults", {"faults": [{"kind": "error"}], "span": "1m"}),
    ("DELETE", "/v1/faults", None),
    ("POST", "/v1/jobs", {"task": "command", "payload": {"argv": ["id"]}, "queue": "mail"}),
]


class Two:
    """An API, a key for queues mail and mail.*, and a job of another queue."""

    def __init__(self, api: Api, keys: Keys) -> None:
        self.api = api
        self.admin = keys.spare
        self.key = keys.make("submit", "read", "operate", "work", queues=("mail", "mail.*"))
        self.single = keys.make("read", queues=("mail",))
        self.foreign = self._submit(self.admin, queue="vault", key="vault-key", payload={"secret": SECRET})
        self.own = self._submit(self.key, queue="mail.eu", key="mail-key", payload={})

    def _submit(self, token: str, **given: Any) -> str:
        answer = ask(self.api, token, "POST", "/v1/jobs", {"task": "work", **given})
        assert answer.status_code == 201, answer.text
        job_id: str = answer.json()["id"]
        return job_id

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = ask(self.api, self.key, method, path, body, **headers)
        assert SECRET not in answer.text
        return answer


@pytest.fixture
def two(home: str, tmp_path: Path) -> Iterator[Two]:
    keys = Keys(tmp_path)
    with Api(home, keys_file=str(keys.path), commands="argv") as api:
        yield Two(api, keys)


def test_own_job_is_not_moved_to_a_queue_of_others(two: Two) -> None:
    refused(two.ask("PATCH", "/v1/jobs/key:mail-key", {"queue": "vault"}), 403, "forbidden")
    assert two.ask("PATCH", "/v1/jobs/key:mail-key", {"queue": "mail"}).json()["queue"] == "mail"
    moved = ask(two.api, two.admin, "PATCH", "/v1/jobs/key:mail-key", {"queue": "vault"})
    assert moved.json()["queue"] == "vault"
    refused(two.ask("PATCH", "/v1/jobs/key:mail-key", {"priority": 1}), 404, "not_found")


def test_a_job_of_another_queue_is_not_there(two: Two) -> None:
    paths = [(each.method, each.path.replace("{queue}", "mail")) for each in OPERATIONS if "{job_id}" in each.path]
    for foreign, missing in ((two.foreign, UNKNOWN_ID), ("key:vault-key", "key:no-key")):
        for method, path in [*paths, ("GET", "/v1/jobs/{job_id}?wait=1")]:
            body = {} if method in ("POST", "PATCH") else None
            named = {each: two.ask(method, path.replace("{job_id}", each), body) for each in (foreign, missing)}
            problem, unknown = (refused(answer, 404, "not_found") for answer in named.values())
            assert problem.pop("request_id") != unknown.pop("request_id")
            assert problem == {**unknown, "detail": unknown["detail"].replace(missing, foreign)}, path
    assert two.ask("GET", f"/v1/jobs/{two.own}").status_code == 200
    assert ask(two.api, two.admin, "GET", f"/v1/jobs/{two.foreign}").json()["payload"] == {"secret": SECRET}


def test_named_jobs_of_others_are_as_good_as_absent(two: Two) -> None:
    done = two.ask("POST", "/v1/jobs/cancel", {"ids": [two.foreign, two.own, UNKNOWN_ID]}).json()
    assert done["changed"] == [{"id": two.own, "state": "cancelled"}]
    assert sorted(each["id"] for each in done["refused"]) == sorted([two.foreign, UNKNOWN_ID])
    assert {each["state"] for each in done["refused"]} == {None}
    assert ask(two.api, two.admin, "GET", f"/v1/jobs/{two.foreign}").json()["state"] == "queued"


def test_key_or_id_of_another_queue_is_a_silent_conflict(two: Two) -> None:
    job = {"task": "work", "payload": {}, "queue": "mail"}
    answers = [
        two.ask("POST", "/v1/jobs", job, **{"idempotency-key": "vault-key"}),
        two.ask("POST", "/v1/jobs", {**job, "key": "vault-key"}),
        two.ask("POST", "/v1/jobs", {**job, "id": two.foreign}),
        two.ask("POST", "/v1/jobs/batch", {"jobs": [job, {**job, "key": "vault-key"}]}),
    ]
    for place, answer in enumerate(answers):
        refused(answer, 409, "conflict")
        assert "vault" not in answer.text
        assert place == 2 or two.foreign not in answer.text
    assert two.api.count() == 2  # nothing of the batch, either


def test_fork_with_the_id_of_a_foreign_job_shows_nothing_of_it(two: Two) -> None:
    two.ask("POST", f"/v1/jobs/{two.own}/cancel", {})
    answer = two.ask("POST", f"/v1/jobs/{two.own}/fork", {"id": two.foreign})
    refused(answer, 409, "conflict")
    assert "vault" not in answer.text
    assert two.api.count() == 2


@pytest.mark.parametrize("strict", [False, True])
def test_key_taken_meanwhile_is_a_conflict_naming_what_is_stored(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, strict: bool
) -> None:
    keys = Keys(tmp_path)
    with Api(home, keys_file=str(keys.path), strict_idempotency=strict) as api:
        two = Two(api, keys)
        _meanwhile(api, monkeypatch, key="late")
        job = {"task": "work", "payload": {}, "queue": "mail"}
        batch = {"jobs": [job, {**job, "key": "late"}, {**job, "key": "free"}]}
        problem = refused(two.ask("POST", "/v1/jobs/batch", batch), 409, "conflict")
        first, taken, last = problem.pop("stored")
        assert (taken, "vault" in str(problem)) == (None, False)
        assert {two.ask("GET", f"/v1/jobs/{job_id}").json()["queue"] for job_id in (first, last)} == {"mail"}
        assert api.count() == 2 + 1 + 2
        again = refused(two.ask("POST", "/v1/jobs/batch", batch), 409, "conflict")
        assert ("stored" in again, api.count()) == (False, 5)  # nothing is stored where it is known before


def _meanwhile(api: Api, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Another client submits a job of another queue under this key right before the next batch is stored."""
    submitter = api.app._submitter
    send = submitter._send

    async def sent(jobs: Sequence[NewJob]) -> list[Submitted]:
        monkeypatch.setattr(submitter, "_send", send)
        await send([api.app.draft_job("work", {"secret": SECRET}, queue="vault", key=key)])
        return await send(jobs)

    monkeypatch.setattr(submitter, "_send", sent)


def test_a_batch_asks_no_more_than_its_key_must(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = two.api.run(two.api.app.open_store())
    asked: list[int] = []

    async def count(verb: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        asked.extend([1] * (verb in ("get", "by_key", "by_keys", "summaries")))
        return await call()

    reads = type(store).query
    monkeypatch.setattr(type(store), "query", property(lambda each: ForwardingQuery(reads.fget(each), count)))
    jobs = [{"task": "work", "payload": {}, "queue": "mail", "key": f"k{number}"} for number in range(250)]
    assert two.ask("POST", "/v1/jobs/batch", {"jobs": jobs}).status_code == 201
    assert len(asked) == 3
    assert two.ask("POST", "/v1/jobs/batch", {"jobs": jobs}).status_code == 200
    assert len(asked) == 7
    assert ask(two.api, two.admin, "POST", "/v1/jobs/batch", {"jobs": jobs}).status_code == 200
    assert len(asked) == 7, "a key for every queue"


def test_strict_idempotency_names_no_job_of_another_queue(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with Api(home, keys_file=str(keys.path), strict_idempotency=True) as api:
        two = Two(api, keys)
        answer = two.ask("POST", "/v1/jobs", {"task": "x", "payload": {}, "queue": "mail", "key": "vault-key"})
        refused(answer, 409, "conflict")
        assert two.foreign not in answer.text
        own = two.ask("POST", "/v1/jobs", {"task": "x", "payload": {}, "queue": "mail", "key": "mail-key"})
        assert two.own in refused(own, 409, "conflict")["detail"]


def test_what_is_not_the_keys_is_refused(two: Two) -> None:
    for method, path, body in NOT_OURS:
        refused(two.ask(method, path, body), 403, "forbidden")
    assert two.api.count() == 2


def test_no_listing_names_another_queue(two: Two) -> None:
    seen = set()
    for operation in OPERATIONS:
        if operation.method != "GET" or "{" in operation.path or operation.path == "/v1/events":
            continue
        answer = two.ask("GET", operation.path)
        assert "vault" not in answer.text, operation.path
        seen.add((operation.path, answer.status_code))
    assert {("/v1/queues", 200), ("/v1/jobs", 403), ("/metrics", 403)} <= seen


def test_lists_show_the_keys_own_queues(two: Two) -> None:
    assert [each["name"] for each in two.ask("GET", "/v1/queues").json()["queues"]] == ["mail.eu"]
    assert [job["id"] for job in two.ask("GET", "/v1/jobs?queue=mail.eu").json()["jobs"]] == [two.own]
    assert ask(two.api, two.single, "GET", "/v1/jobs").json()["jobs"] == []  # its only queue goes without saying
    stats = two.ask("GET", "/v1/stats")
    assert "vault" not in stats.text
    assert "store" not in stats.json()
    assert "store" in ask(two.api, two.admin, "GET", "/v1/stats").json()
    assert stats.json()["counts"]["queued"] == 1


def test_history_counts_the_keys_own_queues(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_history(self: object, since: str = "1h") -> History:
        rows = [HistoryRow(3_600_000_000, queue, JobState.DEAD, 1, 0.0, 0.0) for queue in ("mail.eu", "vault", "vault")]
        return History(HistoryInterval.HOUR, 0, 7_200_000_000, rows)

    monkeypatch.setattr(Holdfast, "read_history", read_history)
    assert [point["dead"] for point in two.ask("GET", "/v1/stats/history").json()["points"]] == [0, 1]
    assert [point["dead"] for point in ask(two.api, two.admin, "GET", "/v1/stats/history").json()["points"]] == [0, 3]


def test_submitter_without_read_scope_sees_only_its_own_data(home: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    submit = keys.make("submit")
    job = {"task": "work", "payload": {"secret": SECRET}, "key": "one"}
    with Api(home, keys_file=str(keys.path)) as api:
        first, again = (ask(api, submit, "POST", "/v1/jobs", job) for _ in range(2))
        assert (first.status_code, first.json()["payload"]) == (201, {"secret": SECRET})
        assert (again.status_code, again.json()["payload"]) == (200, {})
        assert again.json()["id"] == first.json()["id"]


def test_related_jobs_of_others_are_not_named(two: Two) -> None:
    def submit(queue: str, **given: Any) -> str:
        body = {"task": f"{queue}.task", "payload": {}, "queue": queue, **given}
        answer = ask(two.api, two.admin, "POST", "/v1/jobs", body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    own = submit("mail", after=[two.foreign, two.own])
    later, own_later = submit("vault", after=[own]), submit("mail", after=[own])
    answers = {path: two.ask("GET", f"/v1/jobs/{own}/{path}") for path in ("why", "waits", "tree")}
    for answer in answers.values():
        assert not [each for each in (two.foreign, later, "vault") if each in answer.text], answer.text
        assert two.own in answer.text
    assert [each["text"] for each in answers["why"].json()["reasons"]] == [
        "it waits for another job",
        f"it waits for job {two.own} (work), which is queued",
    ]
    assert [each["job_id"] for each in answers["waits"].json()["dependents"]] == [own_later]
    assert [each["id"] for each in answers["tree"].json()["jobs"]] == [own, own_later]
    assert two.foreign in ask(two.api, two.admin, "GET", f"/v1/jobs/{own}/why").text


def test_members_of_a_batch_of_others_are_not_named(two: Two) -> None:
    jobs: list[dict[str, Any]] = [{"task": "work", "payload": {}, "queue": queue} for queue in ("mail", "vault")]
    answer = ask(two.api, two.admin, "POST", "/v1/batches", {"queue": "mail", "jobs": jobs})
    batch, (own, foreign) = answer.json()["id"], answer.json()["jobs"]
    assert ask(two.api, two.admin, "POST", "/v1/jobs/cancel", {"ids": [own, foreign]}).json()["count"] == 2
    for token, replayed in ((two.key, own), (two.admin, f"{own} {foreign}")):
        [reason] = ask(two.api, token, "GET", f"/v1/jobs/{batch}/why").json()["reasons"]
        assert reason["remedy"] == f"to replay jobs of it that have failed: holdfast replay {replayed}"
    after = ask(two.api, two.admin, "POST", "/v1/batches", {"queue": "vault", "jobs": jobs}).json()
    last = {"task": "work", "payload": {}, "queue": "mail", "after": [after["id"]]}
    job_id = ask(two.api, two.admin, "POST", "/v1/jobs", last).json()["id"]
    ask(two.api, two.admin, "POST", "/v1/jobs/cancel", {"ids": after["jobs"]})
    [reason] = two.ask("GET", f"/v1/jobs/{job_id}/why").json()["reasons"]
    assert after["id"] not in reason["remedy"]


def test_holder_of_a_unique_key_in_another_queue_is_not_named(two: Two) -> None:
    job = {"task": "work", "payload": {"a": 1}, "unique": {"during": "active", "by": ["args"]}}
    own = two.ask("POST", "/v1/jobs", {**job, "queue": "mail"}).json()["id"]
    two.ask("POST", f"/v1/jobs/{own}/cancel", {})
    holder = ask(two.api, two.admin, "POST", "/v1/jobs", {**job, "queue": "vault"}).json()["id"]
    why, replay = two.ask("GET", f"/v1/jobs/{own}/why"), two.ask("POST", f"/v1/jobs/{own}/replay", {})
    assert "another job has the same unique key" in refused(replay, 409, "conflict")["detail"]
    assert "another job has the same unique key" in why.json()["reasons"][-1]["text"]
    for answer in (why, replay):
        assert holder not in answer.text
        assert "queued" not in answer.text
    assert holder in ask(two.api, two.admin, "POST", f"/v1/jobs/{own}/replay", {}).text
