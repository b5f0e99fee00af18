"""Redaction: fields by path, and where error texts quote them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast.core.job_logs import LogLine
from holdfast.core.lifecycle import MAX_ERROR_LENGTH
from holdfast.core.models import Attempt, Job, JobState, Options
from holdfast.core.redaction import REDACTED, Redaction
from holdfast.tasks.job_logger import make_entry

HIDDEN = REDACTED
PAYLOAD = {
    "to": "ada",
    "card": {"number": "4111-1111", "name": "Ada"},
    "cards": [{"number": 123456, "cvc": 99}, {"number": 2**80, "cvc": 11}],
    "a": {"b": {"password": "p1p1", "list": [{"password": "p2p2"}]}, "password": "p3p3"},
}


def job(**given: Any) -> Job:
    redacted: dict[str, Any] = {"payload": json.dumps(PAYLOAD), "result": '{"token":"t","n":1}', **given}
    return Job(
        id="x",
        task="t",
        queue="q",
        claims=1,
        attempts=1,
        max_attempts=5,
        priority=0,
        lost_leases=0,
        run_at_us=0,
        created_at_us=0,
        options=Options(metadata={"user": "ada", "key": "k"}, tags=("a",)),
        **redacted,
    )


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        ("payload.card.number", {"card": {"number": HIDDEN, "name": "Ada"}}),
        ("payload.card", {"card": HIDDEN}),
        ("payload.card.*", {"card": {"number": HIDDEN, "name": HIDDEN}}),
        ("payload.cards.number", {"cards": [{"number": HIDDEN, "cvc": 99}, {"number": HIDDEN, "cvc": 11}]}),
        ("payload.*.number", {
            "card": {"number": HIDDEN, "name": "Ada"},
            "cards": [{"number": HIDDEN, "cvc": 99}, {"number": HIDDEN, "cvc": 11}],
        }),
        ("payload.**.password", {
            "a": {"b": {"password": HIDDEN, "list": [{"password": HIDDEN}]}, "password": HIDDEN},
        }),
        ("payload.a.**", {"a": HIDDEN}),
        ("payload.absent.x", {}),
        ("payload.to.x", {}),
        ("result.to", {}),
    ],
)  # fmt: skip
def test_a_path_hides_what_it_leads_to(path: str, changed: dict[str, Any]) -> None:
    assert json.loads(Redaction([path]).redact_job(job()).payload) == PAYLOAD | changed


def test_whole_parts_can_be_hidden() -> None:
    redacted = Redaction(["payload", "result", "metadata"]).redact_job(job())
    assert [json.loads(text or "") for text in (redacted.payload, redacted.result)] == [HIDDEN, HIDDEN]
    assert redacted.options_or_default.metadata == {HIDDEN: True}
    assert redacted.options_or_default.tags == ("a",)
    redacted = Redaction(["result.token", "metadata.key"]).redact_job(job())
    assert json.loads(redacted.result or "") == {"token": HIDDEN, "n": 1}
    assert redacted.options_or_default.metadata == {"user": "ada", "key": HIDDEN}


def test_nothing_named_changes_nothing() -> None:
    assert Redaction([]).redact_job(job(error="e")) == job(error="e")
    assert msgspec.structs.replace(Redaction(["payload.x"]).redact_job(job()), payload="") == job(payload="")


def test_error_texts_quote_nothing_that_is_hidden() -> None:
    redaction = Redaction(["payload.card.number", "payload.cards.cvc", "payload.cards.number"])
    redacted = redaction.redact_job(job(error="card 4111-1111 of 123456, cvc 99"))
    assert redacted.error == f"card {HIDDEN} of {HIDDEN}, cvc 99"  # what is that short stands in every text
    attempt = Attempt(
        attempt=1,
        claims=1,
        worker="w",
        state=JobState.FAILED,
        reason=None,
        error="4111-1111",
        traceback="at 123456",
        started_at_us=None,
        ended_at_us=0,
    )
    [shown] = redaction.redact_attempts(job(), [attempt])
    assert (shown.error, shown.traceback) == (HIDDEN, f"at {HIDDEN}")
    hiding = Redaction(["error"])
    assert hiding.redact_job(job(error="anything")).error == HIDDEN
    assert [each.traceback for each in hiding.redact_attempts(job(), [attempt])] == [HIDDEN]
    assert hiding.redact_job(job()).error is None


def shown_error(value: object, error: str) -> str | None:
    given = job(payload=json.dumps({"secret": value}), error=error)
    return Redaction(["payload.secret"]).redact_job(given).error


@pytest.mark.parametrize("secret", ["back\\slash", "line\nend", """both ' and " of them""", "it's one", "ümläut-\0"])
def test_error_texts_quote_nothing_as_python_or_json_does(secret: str) -> None:
    for quoted in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
        assert shown_error(secret, f"KeyError: <{quoted}>") == f"KeyError: <{HIDDEN}>"
    within = repr(f'"{secret}"')
    assert shown_error(secret, within) == f"""'"{HIDDEN}"'"""


def test_a_text_that_may_quote_too_many_values_is_hidden_whole() -> None:
    secrets = [f"secret \n{number:03}" for number in range(101)]
    assert shown_error(secrets[:100], f"no {secrets[99]!r}") == f"no '{HIDDEN}'"
    assert shown_error(secrets, f"no {secrets[100]}") == HIDDEN
    given = job(payload=json.dumps({"secret": secrets}))
    (shown,) = Redaction(["payload.secret"]).redact_logs(given, [line(f"no {secrets[100]}", '{"n":1}')])
    assert (shown.text, shown.fields) == (HIDDEN, json.dumps(HIDDEN))
    (shown,) = Redaction(["lines.secret"]).redact_logs(job(), [line(secrets[100], json.dumps({"secret": secrets}))])
    assert (shown.text, json.loads(shown.fields or "")) == (HIDDEN, {"secret": HIDDEN})


def test_the_beginning_of_a_value_at_the_end_of_a_cut_text_is_hidden() -> None:
    secret = "4111-2222-4111-3333"
    for length in range(4, len(secret)):
        before = "a" * (MAX_ERROR_LENGTH - length)
        assert shown_error(secret, before + secret[:length]) == before + HIDDEN
    assert shown_error(secret, f"of {secret[:9]}") == f"of {secret[:9]}"  # a whole text
    cut = make_entry("info", f"paid by {secret} and {secret}", {}, 42).text
    assert cut.startswith(f"paid by {secret} and 4111-2222-…")
    given = job(payload=json.dumps({"secret": secret}))
    (shown,) = Redaction(["payload.secret"]).redact_logs(given, [line(cut, None)])
    assert shown.text == f"paid by {HIDDEN} and {HIDDEN}… (51 characters)"


def test_a_spoiled_payload_is_hidden_whole() -> None:
    assert json.loads(Redaction(["payload.x"]).redact_job(job(payload="{spoiled")).payload) == HIDDEN


def line(text: str, fields: str | None) -> LogLine:
    return LogLine(claims=1, number=1, attempt=1, at_us=0, level="info", text=text, fields=fields)


@pytest.mark.parametrize(
    ("path", "text", "fields"),
    [
        ("result.token", "paid 4111-1111", {"card": "4111-1111", "of": ["no 4111-1111"], "sum": 123456}),
        ("payload.card.number", f"paid {HIDDEN}", {"card": HIDDEN, "of": [f"no {HIDDEN}"], "sum": 123456}),
        ("payload.cards.number", "paid 4111-1111", {"card": "4111-1111", "of": ["no 4111-1111"], "sum": HIDDEN}),
        ("lines.card", f"paid {HIDDEN}", {"card": HIDDEN, "of": ["no 4111-1111"], "sum": 123456}),
        ("lines", HIDDEN, HIDDEN),
    ],
)
def test_log_lines_are_without_what_is_hidden(path: str, text: str, fields: Any) -> None:
    given = {"card": "4111-1111", "of": ["no 4111-1111"], "sum": 123456}
    (shown,) = Redaction([path]).redact_logs(job(), [line("paid 4111-1111", json.dumps(given))])
    assert (shown.text, json.loads(shown.fields or "")) == (text, fields)
    (bare,) = Redaction([path]).redact_logs(job(), [line("done", None)])
    assert (bare.text, bare.fields) == (HIDDEN if path == "lines" else "done", None)


def test_fields_that_cannot_be_read_are_hidden_whole() -> None:
    (shown,) = Redaction(["lines.card"]).redact_logs(job(), [line("x", '{"card":')])
    assert shown.fields == json.dumps(HIDDEN)
