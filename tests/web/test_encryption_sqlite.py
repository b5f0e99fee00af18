"""Encrypted jobs over HTTP and in the console: with a key as any other, without it as the store has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.core.encryption import encrypt_text, job_context, key_id_of, result_context
from holdfast.core.ids import new_id
from holdfast.integrations.cryptography import AesGcmCodec, new_key
from tests.console.visitor import Visitor
from tests.web.client import Api
from tests.web.keyed import Keys
from tests.web.working import Worker

CODEC = AesGcmCodec({"2030-01": new_key()})
WORD = "persimmon"


def _key_of(value: Any) -> str:
    """The id of the key of an encrypted value, which has nothing else in it."""
    assert list(value) == ["$encrypted"]
    assert WORD not in json.dumps(value)
    found: str = value["$encrypted"]["key"]
    return found


def test_jobs_are_shown_with_the_key_and_pass_unharmed_without_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    payload, result = {"to": WORD}, {"sent": WORD}
    with Api(url, codec=CODEC) as keyed, Api(url) as keyless:
        ids = [keyed.submit(payload=payload)["id"] for _ in range(2)]
        (job,) = Worker(keyed).claim(limit=1)
        assert (job["id"], job["payload"]) == (ids[0], payload)
        Worker(keyed).settle(job, "succeeded", result=result)
        shown = [api.get(f"/v1/jobs/{ids[0]}") for api in (keyed, keyless)]
        assert (shown[0]["payload"], shown[0]["result"]) == (payload, result)
        assert [_key_of(shown[1][field]) for field in ("payload", "result")] == ["2030-01"] * 2
        (listed,) = keyless.get("/v1/jobs", state="queued")["jobs"]
        assert _key_of(listed["payload"]) == "2030-01"
        # A worker in another language has the key itself, behind an API without it.
        (job,) = Worker(keyless).claim(limit=1)
        assert _key_of(job["payload"]) == "2030-01"
        sealed = encrypt_text(CODEC, json.dumps(result), result_context(job["id"]))
        Worker(keyless).settle(job, "succeeded", result=json.loads(sealed))
        assert keyed.get(f"/v1/jobs/{ids[1]}")["result"] == result


def test_client_with_the_key_submits_through_an_api_without_it(tmp_path: Path) -> None:
    url, job_id = f"sqlite:///{tmp_path}/jobs.db", new_id()
    sealed = json.loads(encrypt_text(CODEC, json.dumps({"to": WORD}), job_context(job_id, "work")))
    with Api(url, codec=CODEC) as keyed, Api(url) as keyless:
        keyless.submit(id=job_id, payload=sealed)
        assert keyed.get(f"/v1/jobs/{job_id}")["payload"] == {"to": WORD}
        copied = keyless.submit(payload=sealed)["id"]  # under another id it is worth nothing
        assert keyed.get(f"/v1/jobs/{copied}")["payload"] == sealed


def test_api_without_the_key_stores_no_plain_arguments_over_encrypted_ones(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    with Api(url, codec=CODEC) as keyed, Api(url) as keyless:
        job_id = keyed.submit(payload={"to": WORD})["id"]
        edit = {"content": json.dumps({"payload": {"to": "b"}}), "headers": {"content-type": "application/json"}}
        problem = keyless.refused("PATCH", f"/v1/jobs/{job_id}", 409, **edit)
        assert problem["code"] == "decryption_failed"
        assert "encrypted with key 2030-01" in problem["detail"]
        assert keyed.post(f"/v1/jobs/{job_id}/cancel")["state"] == "cancelled"


def test_worker_over_http_gives_back_what_it_cannot_decrypt(tmp_path: Path) -> None:
    with Api(f"sqlite:///{tmp_path}/jobs.db") as api:
        job_id = api.submit()["id"]
        worker = Worker(api)
        worker.settle(worker.one(), "dead", reason="encrypted", error={"message": "no key"})
        shown = api.get(f"/v1/jobs/{job_id}")
        assert (shown["state"], shown["reason"], shown["attempts"]) == ("scheduled", "encrypted", 0)


def test_redaction_hides_errors_that_may_quote_encrypted_values(tmp_path: Path) -> None:
    url, paths = f"sqlite:///{tmp_path}/jobs.db", "payload.card"
    with Api(url, codec=CODEC, redacted=paths) as keyed, Api(url, redacted=paths) as keyless:
        job_id = keyed.dead(error=f"no such card: {WORD}", payload={"card": WORD})
        errors = [api.get(f"/v1/jobs/{job_id}")["error"] for api in (keyed, keyless)]
        assert errors == ["no such card: [redacted]", "[redacted]"]


def test_redaction_hides_readable_arguments_without_the_key_and_beside_a_forged_mark(tmp_path: Path) -> None:
    url, paths = f"sqlite:///{tmp_path}/jobs.db", "payload.clinic,payload.patient"
    with (
        Api(url, codec=CODEC, readable=["clinic"], redacted=paths) as keyed,
        Api(url, redacted=paths) as keyless,
        Api(url, redacted="payload") as whole,
    ):
        given = {"clinic": "north", "patient": WORD}
        job_id = keyed.submit(payload=given)["id"]
        keyed.post("/v1/schedules", {"name": "daily", "task": "work", "payload": given, "every": "1d"}, 201)
        keyless.submit(payload={"$encrypted": 1, "patient": WORD}, delay=60)
        for path in (f"/v1/jobs/{job_id}", "/v1/jobs", "/v1/schedules/daily"):
            found, hidden = [json.dumps(api.get(path)) for api in (keyless, whole)]
            assert "2030-01" in found
            assert "[redacted]" in found
            assert not any(word in text for word in ("north", WORD) for text in (found, hidden))
        assert keyed.get(f"/v1/jobs/{job_id}")["payload"] == dict.fromkeys(given, "[redacted]")
        assert whole.get(f"/v1/jobs/{job_id}")["payload"] == "[redacted]"
    with Api(url, redacted="payload.*") as each:
        assert key_id_of(json.dumps(each.get(f"/v1/jobs/{job_id}")["payload"])) == "2030-01"


def test_console_has_a_placeholder_without_the_key(tmp_path: Path) -> None:
    url, keys = f"sqlite:///{tmp_path}/jobs.db", Keys(tmp_path)
    with Api(url, codec=CODEC) as keyed:
        job_id = keyed.submit(payload={"to": WORD})["id"]
        keyed.succeed(job_id, json.dumps(WORD))
    for codec in (None, CODEC):
        with Api(url, codec=codec, keys_file=str(keys.path)) as api:
            visitor = Visitor(api)
            visitor.sign_in(keys.spare)
            page = visitor.open_page(f"/jobs/{job_id}")
            assert page.count("[encrypted with key 2030-01]") == (2 if codec is None else 0)
            assert (WORD in page, "$encrypted" in page) == (codec is not None, False)
