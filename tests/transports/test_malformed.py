"""Messages in a transport that hold no job id: reported, counted, and kept where the transport is a stream."""

from __future__ import annotations

import pytest

from holdfast.core.events import MalformedMessage
from holdfast.core.ids import new_id
from holdfast.telemetry.metrics import Metrics
from holdfast.transports import session
from tests.transports.support import QUICK, Pairing, Recorder, counting, put, take, until, until_succeeded, working

TEXTS = ("hello", "", "x" * 1_000_000, '{"id": "', "\x1b[31mred\r\n\u202e" + new_id(), '{"event": "user.created"}')


def malformed_count(metrics: Metrics) -> float:
    (count,) = [each.series[()] for each in metrics.read() if each.family.name == "transport_malformed_total"]
    assert isinstance(count, float)
    return count


async def test_malformed_messages_are_reported_while_jobs_around_them_run(pairing: Pairing) -> None:
    app = pairing.app(**QUICK)
    runs, events, metrics = counting(app), Recorder(app), Metrics(app.events, labels=10)
    async with app, working(app):
        for text in TEXTS:
            pairing.push(text)
            await app.enqueue("work")
        if pairing.is_stream:
            pairing.execute("XADD", pairing.key(), "*", "event", "user.created", "body", "{}")
        number = len(TEXTS) + pairing.is_stream
        await until_succeeded(app, len(TEXTS))
        await until(lambda: malformed_count(metrics) == number, "the messages")

    assert list(runs.values()) == [1] * len(TEXTS)
    reports = events.of(MalformedMessage)
    assert sorted((each.size, each.text) for each in reports) == sorted(
        [
            (5, "hello"),
            (0, ""),
            (1_000_000, "x" * 80 + "…"),
            (8, '{"id": "'),
            (len(TEXTS[4]), "\\x1b[31mred\\r\\n\\u202e" + TEXTS[4][-36:]),
            (len(TEXTS[5]), TEXTS[5]),
            *([(26, "event user.created body {}")] if pairing.is_stream else []),
        ]
    )
    assert {(each.queue, each.place.partition(":")[0]) for each in reports} == {("default", "Redis at 127.0.0.1")}
    kept_in = pairing.key() + "@malformed" if pairing.is_stream else ""
    assert {each.kept_in for each in reports} == {kept_in}
    assert (pairing.waiting(), pairing.unacknowledged()) == ([], 0)


async def test_reports_of_malformed_messages_are_bounded(pairing: Pairing, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pairing.app() as app:
        events, metrics = Recorder(app), Metrics(app.events, labels=10)
        store = await app.open_store()
        pairing.push(*["\0" * 1000] * 250)
        (job_id,) = await put(store)
        assert await take(store, 500) == [job_id]

        reports = events.of(MalformedMessage)
        assert [each.text for each in reports] == ["\\x00" * 80 + "…"] * 10
        assert malformed_count(metrics) == 250
        if pairing.is_stream:
            assert len(pairing.entries(pairing.key() + "@malformed")) == 100

        monkeypatch.setattr(session, "_REPORT_SPAN", 0.0)
        pairing.push("later")
        await take(store)
        assert [each.unreported for each in events.of(MalformedMessage)] == [0] * 10 + [240]
