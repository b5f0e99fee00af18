"""Alerts: rules, receivers, and one message for each breach, however many processes look."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from msgspec.structs import replace

from holdfast import Holdfast
from holdfast.app.alert_sinks import NotSent
from holdfast.core.alerts import MAX_ALERTS
from holdfast.core.clock import ManualClock
from holdfast.core.errors import ConfigError, Invalid
from holdfast.core.events import AlertCleared, AlertFired, AlertNotSent
from holdfast.core.schedule import ALERTS_SCHEDULE, ScheduleChange
from holdfast.core.workers import WorkerHeartbeat
from tests.support.receiver import Receiver
from tests.worker.support import Recorder, harness

DEAD = {"dead": {"dead_over": 0}}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_app(home: str, clock: ManualClock) -> Any:
    """Makes applications on the same store, as processes of their own have them."""

    def make(rules: dict[str, Any] = DEAD, **settings: Any) -> Holdfast:
        return Holdfast(
            home, clock=clock, now=clock, alerts=rules, **{"alert_hold_off": "10m", "alert_every": "1h", **settings}
        )

    return make


async def kill_jobs(app: Holdfast, *queues: str) -> None:
    """Runs a failing job in each queue."""

    if app.registry.get("fails") is None:

        @app.task("fails", max_attempts=1)
        async def fails() -> None:
            raise ValueError("no")

    async with harness(app) as harnessed:
        for queue in queues:
            await app.enqueue("fails", queue=queue)
        await harnessed.run_until_idle()


@pytest.mark.rows("Q79")
async def test_breach_is_sent_once_whoever_looks(open_app: Any, receiver: Receiver, clock: ManualClock) -> None:
    apps = [open_app(alert_webhook=receiver.url) for _ in range(4)]
    recorders = [Recorder(app) for app in apps]
    async with apps[0], apps[1], apps[2], apps[3]:
        assert await apps[0].alerts.evaluate_rules() == []
        await kill_jobs(apps[0], "mail", "other")
        for _ in range(3):
            await asyncio.gather(*(app.alerts.evaluate_rules() for app in apps))
            clock.advance(60)
        assert sorted(message["queue"] for message in receiver.messages) == ["mail", "other"]
        (message,) = [message for message in receiver.messages if message["queue"] == "mail"]
        assert message["text"] == "queue mail has 1 dead job, more than 0"
        assert (message["rule"], message["state"], message["cleared"]) == ("dead", "firing", None)
        assert sum(len(recorder.of(AlertFired)) for recorder in recorders) == 2
        assert {(each.queue, each.is_sent) for each in await apps[3].alerts.find_active()} == {
            ("mail", True),
            ("other", True),
        }
        assert await apps[0].schedules.find_all() == [], "the schedule that keeps the alerts makes no jobs"


@pytest.mark.rows("Q79")
async def test_alert_is_sent_again_after_clearing_and_hold_off(
    open_app: Any, receiver: Receiver, clock: ManualClock
) -> None:
    app = open_app(alert_webhook=receiver.url)
    recorder = Recorder(app)
    async with app:
        await kill_jobs(app, "mail")
        await app.alerts.evaluate_rules()
        await app.delete((await app.find()).jobs[0].id)
        await app.alerts.evaluate_rules()
        assert receiver.states() == ["firing", "cleared"]
        assert receiver.messages[1]["id"] == receiver.messages[0]["id"]
        assert await app.alerts.find_active() == []
        await kill_jobs(app, "mail")
        clock.advance(599)
        await app.alerts.evaluate_rules()
        assert receiver.states() == ["firing", "cleared"], "within the hold-off"
        clock.advance(2)
        await app.alerts.evaluate_rules()
        assert receiver.states() == ["firing", "cleared", "firing"]
        assert [type(event) for event in recorder.of(AlertFired, AlertCleared)] == [
            AlertFired,
            AlertCleared,
            AlertFired,
        ]


async def test_failed_message_is_sent_again_with_growing_pauses(
    open_app: Any, receiver: Receiver, clock: ManualClock
) -> None:
    app = open_app(alert_webhook=receiver.url)
    recorder = Recorder(app)
    receiver.answer = 500
    async with app:
        await kill_jobs(app, "mail")
        assert await app.alerts.evaluate_rules() == []
        (alert,) = await app.alerts.find_active()
        assert (alert.is_sent, alert.problem) == (False, "alert_webhook answered 500")
        for seconds, total in ((119, 1), (2, 2), (239, 2), (2, 3)):
            clock.advance(seconds)
            await app.alerts.evaluate_rules()
            assert len(receiver.messages) == total
        receiver.answer = 200
        clock.advance(481)
        await app.alerts.evaluate_rules()
        assert [(each.is_sent, each.problem) for each in await app.alerts.find_active()] == [(True, "")]
        assert len({message["id"] for message in receiver.messages}) == 1
        assert (len(recorder.of(AlertFired)), len(recorder.of(AlertNotSent))) == (1, 3)


async def test_receiver_that_fails_gets_one_message_of_a_look(open_app: Any, receiver: Receiver) -> None:
    app = open_app(alert_webhook=receiver.url)
    receiver.answer = 302
    async with app:
        await kill_jobs(app, "a", "b", "c")
        await app.alerts.evaluate_rules()
        assert receiver.paths == ["/hook"], "redirects are not followed"
        problems = sorted(each.problem for each in await app.alerts.find_active())
        expected = "alert_webhook answered 302; redirects are not followed: give the URL to which it leads"
        assert problems == [expected] * 3


async def test_alert_that_was_never_sent_clears_silently(open_app: Any, receiver: Receiver) -> None:
    app = open_app(alert_webhook=receiver.url)
    receiver.answer = 500
    async with app:
        await kill_jobs(app, "mail")
        await app.alerts.evaluate_rules()
        await app.delete((await app.find()).jobs[0].id)
        receiver.answer = 200
        await app.alerts.evaluate_rules()
        assert receiver.states() == ["firing"]
        await kill_jobs(app, "mail")
        await app.alerts.evaluate_rules()
        assert receiver.states() == ["firing", "firing"], "no hold-off: the first one has not been received"


async def test_old_and_unserved_queues_breach_their_rules(open_app: Any, clock: ManualClock) -> None:
    app = open_app({"late": {"queue": "mail", "oldest_over": "10m"}, "unserved": {"unserved_over": "5m"}})

    @app.task("work")
    async def work() -> None: ...

    async def texts() -> list[str]:
        return [alert.text for alert in await app.alerts.evaluate_rules()]

    async with app:
        await work.options(queue="mail").enqueue()
        await work.options(queue="other").enqueue()
        await work.options(queue="other", delay="1d").enqueue()
        clock.advance(301)
        store = await app.open_store()
        heartbeat = WorkerHeartbeat(worker="w", host="h", pid=1, queues="mail", concurrency=1)
        await store.queueing.heartbeat(heartbeat, [], lease_for=timedelta(minutes=30))
        assert await texts() == ["no worker serves queue other: its oldest ready job has waited 5m 1s, longer than 5m"]
        clock.advance(300)
        assert await texts() == ["queue mail: its oldest ready job has waited 10m 1s, longer than 10m"]
        await app.pause("mail")
        assert {alert.queue for alert in await app.alerts.find_active()} == {"mail", "other"}
        clock.advance(1800)
        assert [text.partition(":")[0] for text in await texts()] == ["no worker serves queue mail"]


async def test_failures_are_counted_in_their_window(open_app: Any) -> None:
    app = open_app(
        {
            "some": {"failures_over": 2, "within": "10m"},
            "share": {"failures_over": "20%", "within": "10m"},
            "more": {"failures_over": "30%"},
        }
    )

    @app.task("work", max_attempts=1)
    async def work(*, fails: bool = False) -> None:
        if fails:
            raise ValueError("no")

    async with harness(app) as harnessed:
        for number in range(12):
            await work.options(queue="mail").enqueue(fails=number < 3)
        await harnessed.advance("2m")
        sent = await app.alerts.evaluate_rules()
        text = "queue mail: 3 of 12 jobs that ended in 10m died, more than"
        assert [(alert.rule, alert.text) for alert in sent] == [("some", f"{text} 2"), ("share", f"{text} 20%")]
        await harnessed.advance("10m")
        await app.alerts.evaluate_rules()
        assert await app.alerts.find_active() == []


async def test_alerts_of_other_rules_stay_and_the_number_is_bounded(
    open_app: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_app({"ours": {"dead_over": 0}}), open_app({"theirs": {"dead_over": 0}})
    async with one, other:
        await kill_jobs(one, "a", "b", "c")
        await one.alerts.evaluate_rules()
        monkeypatch.setattr("holdfast.core.alerts.MAX_ALERTS", 4)
        await other.alerts.evaluate_rules()
        assert [len(await app.alerts.find_active()) for app in (one, other)] == [3, 1]
        monkeypatch.setattr("holdfast.core.alerts.MAX_ALERTS", MAX_ALERTS)
        clock.advance(timedelta(days=8).total_seconds())
        await other.alerts.evaluate_rules()
        assert [len(await app.alerts.find_active()) for app in (one, other)] == [0, 3]


async def test_unreadable_alerts_are_forgotten_and_sent_again(open_app: Any, receiver: Receiver) -> None:
    app = open_app(alert_webhook=receiver.url)
    async with app:
        await kill_jobs(app, "mail")
        await app.alerts.evaluate_rules()
        store = await app.open_store()
        (known,) = await store.schedules.read_schedules(ALERTS_SCHEDULE)
        spoiled = replace(known, job=replace(known.job, payload="{}"), paused=False, every_us=60_000_000, at_us=None)
        await store.schedules.write_schedule(ScheduleChange(spoiled, known.revision))
        assert await app.alerts.find_active() == []
        assert len(await app.alerts.evaluate_rules()) == 1
        (kept,) = await store.schedules.read_schedules(ALERTS_SCHEDULE)
        assert (kept.paused, kept.next_us, kept.every_us) == (True, None, None)
        assert receiver.states() == ["firing", "firing"]
        with pytest.raises(
            Invalid, match=r"schedule: 'holdfast\.alerts' is where alerts are kept; give it another name"
        ):
            await app.schedules.add(ALERTS_SCHEDULE, app.draft_job("work", {}), every="1m")
        await app.schedules.remove(ALERTS_SCHEDULE)
        assert len(await app.alerts.evaluate_rules()) == 1


async def test_program_gets_alert_on_its_input_without_a_shell(open_app: Any, tmp_path: Path) -> None:
    script = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
    file = tmp_path / "$(touch alert)"
    app = open_app(alert_command=[sys.executable, "-c", script, str(file)])
    async with app:
        await kill_jobs(app, "mail")
        await app.alerts.evaluate_rules()
    message = json.loads(file.read_text())
    assert (message["state"], message["queue"], message["rule"]) == ("firing", "mail", "dead")
    assert [path.name for path in tmp_path.iterdir() if "alert" in path.name] == [file.name]


async def test_receiver_that_hangs_or_is_missing_is_reported(
    open_app: Any, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.app.alert_sinks.SEND_SECONDS", 0.5)
    secret = receiver.url.replace("//", "//robot:s3cret@") + "?token=s3cret"
    receiver.hangs.clear()
    pid = tmp_path / "pid"
    hanging = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    for settings, problem in (
        ({"alert_webhook": secret}, "took longer than 0.5 s"),
        ({"alert_webhook": "http://robot:s3cret@127.0.0.1:1/s3cret"}, "cannot be used: "),
        ({"alert_command": [sys.executable, "-c", hanging]}, "took longer than 0.5 s"),
        ({"alert_command": ["/nonexistent"]}, "alert_command /nonexistent cannot be used: No such file or directory"),
        ({"alert_command": "false"}, "alert_command false ended with 1"),
    ):
        with pytest.raises(NotSent) as raised:
            await open_app(**settings).alerts.send_test()
        assert problem in str(raised.value)
        assert "s3cret" not in str(raised.value)
    assert receiver.headers[0]["Authorization"] == "Basic cm9ib3Q6czNjcmV0"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_worker_sweeps_while_its_receiver_hangs(open_app: Any, receiver: Receiver) -> None:
    receiver.hangs.clear()
    app = open_app(alert_webhook=receiver.url, alert_every="1s")

    @app.task("fails", max_attempts=1)
    async def fails() -> None:
        raise ValueError("no")

    async with harness(app) as harnessed:
        await fails.enqueue()
        await harnessed.advance("2s")
        assert await asyncio.to_thread(receiver.arrived.wait, 20)
        handle = await fails.options(expires="5s", queue="unserved", delay="1s").enqueue()
        await harnessed.advance("30s")
        assert await handle.state() in ("cancelled", "dead"), "sweeps go on"
        assert len(receiver.messages) == 1


async def test_certificate_of_a_receiver_is_checked(
    open_app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    receiver = Receiver(context)
    try:
        app = open_app(alert_webhook=receiver.url.replace("http://127.0.0.1", "https://localhost"))
        with pytest.raises(NotSent, match=r"/\*\*\* cannot be used: "):
            await app.alerts.send_test()
        assert receiver.messages == []
        authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        await app.alerts.send_test()
        assert receiver.states() == ["test"]
    finally:
        receiver.close()


def test_wrong_rules_and_receivers_are_refused_with_their_place() -> None:
    for settings, problem in (
        (
            {"alerts": {"mail": {}}},
            "alerts.mail.condition: None is not valid; give exactly one of dead_over, oldest_over",
        ),
        (
            {"alerts": {"mail": {"dead_over": 1, "oldest_over": "1m"}}},
            "'dead_over, oldest_over' is not valid; give exac",
        ),
        ({"alerts": {"mail": {"dead_ovr": 1}}}, "did you mean dead_over?"),
        ({"alerts": {"mail": {"dead_over": -1}}}, "alerts.mail.dead_over: -1"),
        ({"alerts": {"mail": {"failures_over": "150%"}}}, 'give a share from "0%" to "100%", such as "5%"'),
        (
            {"alerts": {"mail": {"failures_over": 1, "within": "1m"}}},
            "alerts.mail.within: '1m' is not valid; give 5m to 6h",
        ),
        ({"alerts": {"mail": {"dead_over": 1, "within": "1h"}}}, "leave it out: it belongs to failures_over"),
        ({"alerts": {"MAIL": {"dead_over": 1}}}, "MAIL"),
        ({"alerts": {"mail": {"dead_over": 1, "queue": "No"}}}, "alerts.mail.queue: 'No'"),
        ({"alert_webhook": "ftp://a:s3cret@b/"}, "alert_webhook: '***' is not valid; write the URL of a receiver"),
        ({"alert_webhook": "https://a/\nHost: b"}, "alert_webhook: '***' is not valid"),
        ({"alert_webhook": "https://a:65536/s3cret"}, "alert_webhook: 'https://a:65536/***' is not valid"),
        ({"alert_command": "say 'hello"}, "alert_command: "),
        ({"alert_command": []}, "alert_command: [] is not valid"),
        (
            {"alert_webhook": "https://a/", "alert_command": "say"},
            "alerts go to alert_webhook already; keep one of them",
        ),
    ):
        with pytest.raises(ConfigError) as raised:
            Holdfast("sqlite:///unopened.db", **settings)
        assert problem in str(raised.value)
        assert "s3cret" not in str(raised.value)


def test_settings_show_a_webhook_without_its_secrets() -> None:
    app = Holdfast(
        "sqlite:///unopened.db", alert_webhook="https://a:b@hooks.example.com:8443/services/T0/s3cret?token=s3cret"
    )
    assert app.settings.describe_setting("alert_webhook").text == "https://hooks.example.com:8443/***"
    rules = {"mail": {"queue": "mail", "failures_over": "5%", "within": "1h"}, "dead": {"dead_over": 3}}
    shown = Holdfast("sqlite:///unopened.db", alerts=rules).settings.describe_setting("alerts").text
    assert json.loads(shown) == rules


async def test_breach_that_ends_while_its_message_is_sent_is_cleared(
    open_app: Any, receiver: Receiver, clock: ManualClock
) -> None:
    app, other = open_app(alert_webhook=receiver.url), open_app(alert_webhook=receiver.url)
    async with app, other:
        await kill_jobs(app, "mail")
        receiver.hangs.clear()
        sending = asyncio.create_task(app.alerts.evaluate_rules())
        assert await asyncio.to_thread(receiver.arrived.wait, 30)
        await other.delete((await other.find()).jobs[0].id)
        await other.alerts.evaluate_rules()
        receiver.hangs.set()
        await sending
        clock.advance(60)
        await other.alerts.evaluate_rules()
    assert receiver.states() == ["firing", "cleared"]


@pytest.mark.parametrize("cause", ["timeout", "death"])
async def test_breach_whose_message_may_have_arrived_is_cleared(
    open_app: Any, receiver: Receiver, clock: ManualClock, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = open_app(alert_webhook=receiver.url)
    async with app:
        await kill_jobs(app, "mail")
        receiver.hangs.clear()
        if cause == "timeout":
            monkeypatch.setattr("holdfast.app.alert_sinks.SEND_SECONDS", 0.5)
            await app.alerts.evaluate_rules()
            assert "took longer" in (await app.alerts.find_active())[0].problem
        else:
            sending = asyncio.create_task(app.alerts.evaluate_rules())
            assert await asyncio.to_thread(receiver.arrived.wait, 30)
            sending.cancel()
            await asyncio.wait([sending])
            clock.advance(121)
        monkeypatch.undo()
        receiver.hangs.set()
        await app.delete((await app.find()).jobs[0].id)
        await app.alerts.evaluate_rules()
    assert receiver.states() == ["firing", "cleared"]


async def test_message_that_an_alert_has_cleared_is_tried_for_a_day(
    open_app: Any, receiver: Receiver, clock: ManualClock
) -> None:
    app = open_app(alert_webhook=receiver.url)
    async with app:
        for answer, states in ((200, ["firing", "cleared", "cleared"]), (500, ["firing", "cleared"])):
            receiver.messages.clear()
            await kill_jobs(app, "mail")
            await app.alerts.evaluate_rules()
            receiver.answer = 500
            await app.delete((await app.find()).jobs[0].id)
            await app.alerts.evaluate_rules()
            clock.advance(3600 if answer == 200 else 86_400)
            receiver.answer = answer
            await app.alerts.evaluate_rules()
            assert receiver.states() == states
            clock.advance(600)
            await app.alerts.evaluate_rules()
            receiver.answer = 200
            clock.advance(3600)
            await app.alerts.evaluate_rules()
            assert receiver.states() == states


async def test_new_breach_is_not_kept_back_by_a_message_that_failed(
    open_app: Any, receiver: Receiver, clock: ManualClock
) -> None:
    app = open_app(alert_webhook=receiver.url)
    async with app:
        await kill_jobs(app, "mail")
        await app.alerts.evaluate_rules()
        receiver.answer = 500
        await app.delete((await app.find()).jobs[0].id)
        await app.alerts.evaluate_rules()
        receiver.answer = 200
        await kill_jobs(app, "mail")
        clock.advance(600)
        await app.alerts.evaluate_rules()
        assert receiver.states() == ["firing", "cleared", "firing"]
