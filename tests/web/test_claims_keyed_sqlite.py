"""Keys and the workers that show them: which queues they claim from, and whose workers they are."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.web.client import Api
from tests.web.keyed import LOSSES, Keys, ask, id_of, loses, refused


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def api(home: str, keys: Keys) -> Iterator[Api]:
    """The API that asks for keys, and whose workers beat often."""
    with Api(home, keys_file=str(keys.path), heartbeat="200ms") as api:
        yield api


def work(api: Api, token: str, what: str, worker: str, **given: Any) -> Any:
    answer = ask(api, token, "POST", f"/v1/claims{what}", {"worker": worker, **given})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def submit_later(api: Api, keys: Keys, queue: str) -> str:
    job = {"task": "work", "payload": {}, "queue": queue}
    answer = await api.raw("POST", "/v1/jobs", json=job, headers={"authorization": f"Bearer {keys.spare}"})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def submit(api: Api, keys: Keys, queue: str) -> str:
    return api.run(submit_later(api, keys, queue))


def test_a_key_without_the_scope_claims_nothing(api: Api, keys: Keys) -> None:
    token = keys.make("submit", "read", "operate")
    for path in ("", "/extend", "/settle", "/leave"):
        refused(ask(api, token, "POST", f"/v1/claims{path}", {"worker": "w", "leases": []}), 403, "forbidden")


def test_a_worker_is_its_key_s_alone(api: Api, keys: Keys) -> None:
    """Another key that uses the same id, and even the same token, is another worker."""
    one, other = keys.make("work"), keys.make("work")
    submit(api, keys, "default")
    (job,) = work(api, one, "", "w")["jobs"]
    settlements = [{"token": job["token"], "outcome": "succeeded"}]

    work(api, other, "", "w")
    assert work(api, other, "/extend", "w", leases=[job["token"]])["leases"][0]["verdict"] == "lost"
    assert work(api, other, "/settle", "w", settlements=settlements)["jobs"][0]["verdict"] == "lost"
    assert work(api, other, "/leave", "w", leases=[job["token"]])["released"] == 0

    listed = ask(api, keys.spare, "GET", "/v1/workers").json()["workers"]
    assert [each["id"] for each in listed] == [f"{id_of(one)}.w"]
    assert work(api, one, "/settle", "w", settlements=settlements)["jobs"][0]["verdict"] == "accepted"


def test_a_key_claims_from_its_own_queues(api: Api, keys: Keys) -> None:
    token = keys.make("work", queues=("mail.*", "news"))
    for queue in ("mail.in", "news", "secret"):
        submit(api, keys, queue)

    refused(ask(api, token, "POST", "/v1/claims", {"worker": "w", "queues": ["secret"]}), 403, "forbidden")
    refused(ask(api, token, "POST", "/v1/claims", {"worker": "w", "queues": {"secret": 0, "*": 1}}), 403, "forbidden")
    jobs = work(api, token, "", "w", limit=10)["jobs"]
    assert sorted(job["queue"] for job in jobs) == ["mail.in", "news"]


def test_what_a_key_may_not_see_it_learns_nothing_of(api: Api, keys: Keys) -> None:
    token = keys.make("work", queues=("mail",))
    submit(api, keys, "secret")
    (job,) = work(api, keys.spare, "", "w")["jobs"]
    (settled,) = work(api, token, "/settle", "w", settlements=[{"token": job["token"], "outcome": "succeeded"}])["jobs"]
    assert (settled["verdict"], settled["state"]) == ("lost", None)


def test_a_key_whose_queues_are_not_there_claims_nothing(api: Api, keys: Keys) -> None:
    token = keys.make("work", queues=("mail.*",))
    submit(api, keys, "secret")
    assert work(api, token, "", "w")["jobs"] == []


# ── what changes while a claim waits ──────────────────────────────────────────────────────────────────────────────
def waited(api: Api, token: str, method: str, path: str, given: Any, meanwhile: Callable[[], Awaitable[object]]) -> Any:
    """The answer to a request that waits, when this has been done meanwhile."""

    async def use() -> httpx.Response:
        asking = asyncio.create_task(api.raw(method, path, headers={"authorization": f"Bearer {token}"}, **given))
        await asyncio.sleep(0.3)
        assert not asking.done()
        await meanwhile()
        return await asking

    return api.run(use())


@loses
@pytest.mark.parametrize("beats", [True, False])
def test_waiting_claim_gets_no_job_once_its_key_has_lost_rights(
    home: str, keys: Keys, loss: str, *, beats: bool
) -> None:
    """Neither one that comes the moment after, nor, where none comes, an answer as if it were good."""
    with Api(home, keys_file=str(keys.path), heartbeat="200ms" if beats else "10s") as api:
        token = keys.make("work")

        async def meanwhile() -> None:
            keys.change(token, LOSSES[loss])
            if not beats:
                await submit_later(api, keys, "default")

        answer = waited(api, token, "POST", "/v1/claims", {"json": {"worker": "w", "wait": 40}}, meanwhile)
        refused(answer, 401, "unauthorized")
        if not beats:
            assert len(work(api, keys.spare, "", "w", wait=40)["jobs"]) == 1


@loses
def test_waiting_read_sees_no_job_once_its_key_has_lost_rights(api: Api, keys: Keys, loss: str) -> None:
    token = keys.make("read")
    job_id = submit(api, keys, "default")

    async def meanwhile() -> None:
        keys.change(token, LOSSES[loss])
        await api.app.cancel(job_id)

    answer = waited(api, token, "GET", f"/v1/jobs/{job_id}", {"params": {"wait": 40}}, meanwhile)
    refused(answer, 401, "unauthorized")


def test_waiting_claim_goes_on_with_a_key_that_is_given_more(api: Api, keys: Keys) -> None:
    token = keys.make("work", queues=("mail",))

    async def meanwhile() -> None:
        keys.change(token, lambda key: replace(key, queues=("news", "mail"), scopes=("read", "work")))
        await submit_later(api, keys, "mail")

    answer = waited(api, token, "POST", "/v1/claims", {"json": {"worker": "w", "wait": 40}}, meanwhile)
    assert [job["queue"] for job in answer.json()["jobs"]] == ["mail"]


def test_waiting_read_shows_no_job_that_was_moved_away(api: Api, keys: Keys) -> None:
    token = keys.make("read", queues=("mail",))
    job_id = submit(api, keys, "mail")

    async def meanwhile() -> None:
        await api.app.edit(job_id, queue="vault", payload={"secret": "canary"})
        await api.app.cancel(job_id)

    answer = waited(api, token, "GET", f"/v1/jobs/{job_id}", {"params": {"wait": 40}}, meanwhile)
    refused(answer, 404, "not_found")
    assert "canary" not in answer.text


def test_limited_key_waits_for_queues_that_appear_later(api: Api, keys: Keys) -> None:
    token = keys.make("work", queues=("mail.*",))

    async def meanwhile() -> None:
        await submit_later(api, keys, "secret")
        await submit_later(api, keys, "mail.new")

    answer = waited(api, token, "POST", "/v1/claims", {"json": {"worker": "w", "wait": 40}}, meanwhile)
    assert [job["queue"] for job in answer.json()["jobs"]] == ["mail.new"]


@pytest.mark.parametrize(
    ("given", "number"), [({}, 1), ({"queues": {"*": 2}}, 2), ({"queues": ["mail.a", "mail.b"]}, 1), ({"limit": 3}, 3)]
)
def test_a_claim_brings_no_more_jobs_than_it_asks_for(api: Api, keys: Keys, given: Any, number: int) -> None:
    token = keys.make("work", queues=("mail.*",))
    for queue in ("mail.a", "mail.b", "mail.c", "mail.d"):
        submit(api, keys, queue)
    assert len(work(api, token, "", "w", **given)["jobs"]) == number


@pytest.mark.parametrize(
    ("given", "named", "others"),
    [
        ({"queues": {"mail": 2, "*": 1}}, 2, 1),
        ({"queues": {"mail": 1, "*": 2}}, 1, 2),
        ({"queues": {"mail": 9, "*": 1}}, 3, 1),
        ({"queues": {"mail": 0, "*": 4}}, 0, 4),
        ({"queues": {"mail": 9, "*": 2}, "limit": 20}, 3, 2),
    ],
)
def test_queues_of_a_limited_key_share_the_slots_of_every_other_queue(
    api: Api, keys: Keys, given: Any, named: int, others: int
) -> None:
    limited = keys.make("work", queues=("mail", "mail.*"))
    for queue in ("mail", "mail.a", "mail.b"):
        for _ in range(3):
            submit(api, keys, queue)
    for token in (limited, keys.spare):
        jobs = work(api, token, "", "w", **given)["jobs"]
        assert Counter(job["queue"] == "mail" for job in jobs) == Counter({True: named, False: others})
        work(api, token, "/leave", "w", leases=[job["token"] for job in jobs])


def test_worker_with_a_limited_key_is_listed_with_its_queues(api: Api, keys: Keys) -> None:
    token = keys.make("work", "read", queues=("mail.*", "news"))
    work(api, token, "/extend", "early", leases=[])
    work(api, token, "", "w", concurrency=1, running=1)
    listed = ask(api, keys.spare, "GET", "/v1/workers").json()["workers"]
    assert {each["queues"] for each in listed} == {"mail.*,news"}

    def codes(token: str, queue: str) -> list[str]:
        job_id = submit(api, keys, queue)
        return [each["code"] for each in ask(api, token, "GET", f"/v1/jobs/{job_id}/why").json()["reasons"]]

    assert "no_worker" in codes(keys.spare, "secret")
    assert "no_worker" not in codes(token, "mail.in")


def test_why_hides_global_numbers_from_a_limited_key(api: Api, keys: Keys) -> None:
    token = keys.make("read", queues=("mail",))
    job_id = submit(api, keys, "mail")
    work(api, keys.spare, "", "w", queues={"other": 1}, concurrency=7, running=7)

    def text() -> str:
        return str(ask(api, token, "GET", f"/v1/jobs/{job_id}/why").json()["reasons"][0]["text"])

    assert text() == "no living worker serves queue mail"
    work(api, keys.spare, "", "w2", queues={"other": 1, "mail": 0}, concurrency=7, running=7)
    assert text() == "every worker of its queue is busy"
