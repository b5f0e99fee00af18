"""Keys and the workers that show them: which queues they claim from, and whose workers they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.web.client import Api
from tests.web.keyed import Keys, ask, id_of, refused


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def api(home: str, keys: Keys) -> Iterator[Api]:
    """The API that asks for keys."""
    with Api(home, keys_file=str(keys.path)) as api:
        yield api


def work(api: Api, token: str, what: str, worker: str, **said: Any) -> Any:
    answer = ask(api, token, "POST", f"/v1/claims{what}", {"worker": worker, **said})
    assert answer.status_code == 200, answer.text
    return answer.json()


def submit(api: Api, keys: Keys, queue: str) -> None:
    answer = ask(api, keys.spare, "POST", "/v1/jobs", {"type": "work", "payload": {}, "queue": queue})
    assert answer.status_code == 201, answer.text


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
    (told,) = work(api, token, "/settle", "w", settlements=[{"token": job["token"], "outcome": "succeeded"}])["jobs"]
    assert (told["verdict"], told["status"]) == ("lost", None)


def test_a_key_whose_queues_are_not_there_claims_nothing(api: Api, keys: Keys) -> None:
    token = keys.make("work", queues=("mail.*",))
    submit(api, keys, "secret")
    assert work(api, token, "", "w")["jobs"] == []
