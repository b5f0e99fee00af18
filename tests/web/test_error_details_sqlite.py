"""Errors inside are described in the log; clients get a remedy, and no address, file or user name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.core.errors import ConfigError, ForkedConnection, HoldfastError, StoreMismatch, Unavailable
from holdfast.core.events import Event, RequestFailed, StoreTrouble
from holdfast.stores.common.unconfirmed import perhaps_done, perhaps_stored
from holdfast.web.messages import answer_to
from tests.web.client import Api

INSIDE = "PostgreSQL at db-7.internal:5432: password authentication failed for user shop; select * from job; /var/x.db"
ERRORS = [
    (ConfigError(INSIDE), 500, "configuration"),
    (StoreMismatch(INSIDE), 500, "configuration"),
    (HoldfastError(INSIDE), 500, "internal"),
    (ForkedConnection(INSIDE), 500, "internal"),
    (OSError(INSIDE), 500, "internal"),
    (Unavailable(INSIDE), 503, "unavailable"),
    (perhaps_done(Unavailable(INSIDE)), 503, "unavailable"),
    (perhaps_stored(Unavailable(INSIDE)), 503, "unavailable"),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_internal_error_text_is_never_returned(error: Exception, status: int, code: str) -> None:
    answer = answer_to(error, "r1")
    assert (answer.status, f'"code":"{code}"' in answer.body.decode()) == (status, True)
    assert b'"remedy":"' in answer.body
    for word in INSIDE.split():
        assert len(word) < 4 or word.encode() not in answer.body, word


def test_possibly_completed_operation_is_reported() -> None:
    assert b"full; the job may be stored all the same: submit it" in answer_to(ERRORS[-1][0], "r1").body
    assert b"full; it may have been done all the same: look" in answer_to(ERRORS[-2][0], "r1").body


def record_events(api: Api, kind: type[Event]) -> list[Any]:
    events: list[Event] = []
    api.app.events.subscribe(events.append, kind)
    return events


@pytest.mark.parametrize("path", ["/health/ready", "/v1/jobs", "/v1/stats"])
def test_unusable_file_is_named_only_in_the_log(tmp_path: Path, path: str) -> None:
    with Api(f"sqlite:///{tmp_path}/jobs.db", hurried=True) as api:
        failures = record_events(api, RequestFailed)

        async def ask() -> httpx.Response:
            await api.app.close()
            (tmp_path / "jobs.db").write_bytes(b"no database" * 1000)
            return await api.raw("GET", path, headers={"x-request-id": "r-77"})

        answer = api.run(ask())
        assert (answer.status_code, answer.json()["code"]) == (500, "configuration")
        assert "jobs.db" not in answer.text
        assert str(tmp_path) not in answer.text
        assert [(each.request_id, f"{tmp_path}/jobs.db" in each.error) for each in failures] == [("r-77", True)]


def test_store_error_is_logged_under_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter([INSIDE, INSIDE, *(f"{INSIDE} {number}" for number in range(50))])

    async def away(*_: object) -> None:
        raise Unavailable(next(texts))

    with Api(f"sqlite:///{tmp_path}/jobs.db", hurried=True) as api:
        reported = record_events(api, StoreTrouble)
        monkeypatch.setattr(api.app, "get", away)
        for number in range(20):
            assert INSIDE not in api.ask("GET", "/v1/jobs/key:x", headers={"x-request-id": f"r-{number}"}).text
    assert [(each.request_id, each.error) for each in reported[:2]] == [("r-0", INSIDE), ("r-2", f"{INSIDE} 0")]
    assert len(reported) == 10  # however many there are, and each but once
