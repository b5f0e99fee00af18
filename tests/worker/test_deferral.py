"""Jobs that their worker cannot run: given back for another worker without an attempt, dead once their time is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from holdfast import Holdfast, JobHandle, ResultTimeout, Settings
from holdfast.cli.inspect import job_rows
from holdfast.core.errors import Unavailable
from holdfast.core.events import JobDeferred, JobUnstartable, PayloadUnfit, TaskUnknown
from holdfast.core.lifecycle import Failed, Released
from holdfast.core.models import Job, Reason
from holdfast.tasks import Registry, Task
from holdfast.telemetry.metrics import Metrics
from holdfast.views.explain import explain_job, job_facts
from holdfast.views.formatting import format_moment
from holdfast.worker.policy import Deferrals
from tests.worker.support import Recorder, harness

HOUR = 3600
CASES = [("newer.task", {"to": "a"}, "no_handler"), ("mail.send", {"recipient": "a"}, "payload")]
MISFITS = pytest.mark.parametrize(("task", "payload", "reason"), CASES, ids=["unknown task", "payload"])


async def _submit(app: Holdfast, task: str, payload: dict[str, Any], **options: Any) -> JobHandle[Any]:
    """A job from a program that has newer code than this application, which gets its task only now."""
    job = await app.enqueue(task, payload, **options)
    _register(app)
    return job


def _register(app: Holdfast) -> None:
    @app.task("mail.send")
    async def send(to: str) -> str:
        return to


def _noting(ran: list[dict[str, Any]]) -> Callable[..., None]:
    def handler(**payload: Any) -> None:
        ran.append(payload)

    return handler


@MISFITS
async def test_misfit_waits_without_an_attempt_for_a_worker_that_fits(
    app: Holdfast, task: str, payload: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness(app) as harnessed:
        job = await _submit(app, task, payload, max_attempts=1)
        hand = await harnessed.start()
        await harnessed.advance(300)
        waiting = await job.job()
        assert (waiting.state, waiting.reason, waiting.attempts) == ("scheduled", reason, 0)
        assert waiting.claims > 1
        assert await app.attempts(job.id) == []
        hand.worker.stop()
        await harnessed.advance(1)
        ran: list[dict[str, Any]] = []
        newer = Registry()
        newer.register(Task(task, _noting(ran)))
        monkeypatch.setattr(app, "registry", newer)
        await harnessed.start()
        await harnessed.advance(61)
        assert await job.state() == "succeeded"
    assert ran == [payload]


@MISFITS
async def test_misfit_is_dead_after_the_setting(app: Holdfast, task: str, payload: dict[str, Any], reason: str) -> None:
    events = Recorder(app)
    async with harness(app, defer_for="10m") as harnessed:
        job = await _submit(app, task, payload)
        began = harnessed.now
        await harnessed.start()
        await harnessed.advance(599)
        assert await job.state() == "scheduled"
        await harnessed.advance(2)
        dead = await job.job()
    assert (dead.state, dead.reason, dead.attempts) == ("dead", reason, 1)
    instants = [began, *[event.retry_at for event in events.of(JobDeferred)]]
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(instants)]
    assert 1 <= gaps[0] <= 2
    assert max(gaps[:-1]) <= 60
    assert 10 < len(gaps) < 40
    assert events.of(JobUnstartable) == []


@MISFITS
@pytest.mark.parametrize("wait", ["backlog", "schedule"])
async def test_time_before_the_first_try_does_not_count(
    app: Holdfast, task: str, payload: dict[str, Any], reason: str, wait: str
) -> None:
    async with harness(app, defer_for="10m") as harnessed:
        options = {"delay": 2 * HOUR} if wait == "schedule" else {}
        job = await _submit(app, task, payload, **options)
        if wait == "backlog":
            await app.pause("default")
        await harnessed.start()
        await harnessed.advance(2 * HOUR)
        await app.resume("default")
        await harnessed.advance(595)
        waiting = await job.job()
        assert (waiting.state, waiting.reason) == ("scheduled", reason)
        await harnessed.advance(10)
        assert await job.state() == "dead"


async def test_replay_gives_the_whole_time_again(app: Holdfast) -> None:
    async with harness(app, defer_for="10m") as harnessed:
        job = await _submit(app, *CASES[0][:2])
        await harnessed.start()
        await harnessed.advance(601)
        assert await job.state() == "dead"
        await app.replay(job.id)
        await harnessed.advance(590)
        assert await job.state() == "scheduled"
        await harnessed.advance(15)
        assert await job.state() == "dead"


@MISFITS
async def test_misfit_is_dead_at_once_where_the_setting_is_zero(
    app: Holdfast, task: str, payload: dict[str, Any], reason: str
) -> None:
    async with harness(app, defer_for="0s") as harnessed:
        job = await _submit(app, task, payload)
        await harnessed.start()
        await harnessed.advance(1)
        dead = await job.job()
    assert (dead.state, dead.reason, dead.attempts) == ("dead", reason, 1)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("dead", ("dead", "no_handler", 1)),
        ("retry", ("dead", "max_attempts", 2)),
        ("defer", ("scheduled", "no_handler", 0)),
    ],
)
async def test_unknown_task_ends_as_the_setting_says(
    app: Holdfast, setting: str, expected: tuple[str, str, int]
) -> None:
    async with harness(app, unknown_task=setting, retry="fixed:60") as harnessed:
        job = await app.enqueue("nowhere", {}, max_attempts=2)
        misfit = await _submit(app, *CASES[1][:2])
        await harnessed.start()
        await harnessed.advance(100)
        seen = await job.job()
        assert await misfit.state() == "scheduled"
    assert (seen.state, seen.reason, seen.attempts) == expected


async def test_misfits_are_warned_of_once_a_task_and_counted(app: Holdfast) -> None:
    events, metrics = Recorder(app), Metrics(app.events, labels=100)
    async with harness(app) as harnessed:
        for task, payload in [*[case[:2] for case in CASES * 3], ("third.task", {})]:
            await app.enqueue(task, payload)
        _register(app)
        await harnessed.start()
        await harnessed.advance(100)
    assert [event.task for event in events.of(PayloadUnfit)] == ["mail.send"]
    assert sorted(event.task for event in events.of(TaskUnknown)) == ["newer.task", "third.task"]
    deferred = next(each for each in metrics.read() if each.family.name == "jobs_deferred_total")
    counted = {labels: value for labels, value in deferred.series.items() if value}
    assert set(counted) == {("mail.send", "payload"), ("newer.task", "no_handler"), ("third.task", "no_handler")}
    assert sum(counted.values()) == len(events.of(JobDeferred))
    metrics.close()


@MISFITS
async def test_why_explains_a_deferred_job(app: Holdfast, task: str, payload: dict[str, Any], reason: str) -> None:
    async with harness(app) as harnessed:
        job = await _submit(app, task, payload)
        await harnessed.start()
        await harnessed.advance(100)
        waiting = await job.job()
        [first, *_] = list(explain_job(waiting, await job_facts(app, waiting)))
    assert first.code == "deferred"
    causes = {"no_handler": "no task 'newer.task' is registered", "payload": "argument 'recipient' of task 'mail.send'"}
    assert first.text.startswith(f"deferred since 2031-01-01 00:00:00Z: worker {waiting.worker} cannot run it: ")
    assert causes[reason] in first.text
    assert f"; next try at {format_moment(waiting.run_at_us)}; " in first.text
    assert first.text.endswith(f"; dead ({reason}) at 2031-01-01 01:00:00Z (defer_for 1h)")
    assert (f"holdfast cancel {job.id}, then holdfast replay {job.id} --payload" in first.remedy) == (
        reason == "payload"
    )


@MISFITS
@pytest.mark.parametrize("defer_for", ["1h", "0s"])
async def test_first_misfit_is_logged_with_its_error_and_deadline(
    app: Holdfast, task: str, payload: dict[str, Any], reason: str, defer_for: str
) -> None:
    events = Recorder(app)
    async with harness(app, defer_for=defer_for) as harnessed:
        job = await _submit(app, task, payload)
        began = harnessed.now
        await harnessed.start()
        await harnessed.advance(1)
        failed = await job.job()
    [event] = [*events.of(PayloadUnfit), *events.of(TaskUnknown)]
    assert failed.error is not None
    assert failed.error.endswith(event.error)
    assert event.deferred_until == (began + timedelta(hours=1) if defer_for == "1h" else None)
    if reason == "payload":
        cancelling = f"holdfast cancel {job.id}, then " if defer_for == "1h" else ""
        assert event.remedy.endswith(f": {cancelling}holdfast replay {job.id} --payload '{{...}}'")


async def test_remedy_corrects_the_arguments_of_a_deferred_job(app: Holdfast) -> None:
    async with harness(app) as harnessed:
        job = await _submit(app, "mail.send", {"recipient": "a"})
        await harnessed.start()
        await harnessed.advance(10)
        await app.cancel_one(job.id)
        await app.replay(job.id, payload={"to": "a"})
        await harnessed.advance(10)
        assert await job.state() == "succeeded"


@MISFITS
async def test_timed_out_result_says_that_the_job_is_deferred(
    app: Holdfast, task: str, payload: dict[str, Any], reason: str
) -> None:
    async with harness(app) as harnessed:
        job = await _submit(app, task, payload)
        await harnessed.start()
        await harnessed.advance(10)
        with pytest.raises(ResultTimeout, match=f"is deferred, .* see: holdfast why {job.id}$"):
            await job.result(timeout=0)


@MISFITS
async def test_list_shows_why_a_job_is_deferred_first(
    app: Holdfast, task: str, payload: dict[str, Any], reason: str
) -> None:
    async with harness(app) as harnessed:
        job = await _submit(app, task, payload)
        await harnessed.start()
        await harnessed.advance(10)
        [row] = job_rows([await job.job()])
    assert str(row[-1]).startswith(("no task 'newer.task'", "argument 'recipient' of"))


def test_deferral_lasts_an_hour_by_default() -> None:
    assert Settings.load(environ={}, directory="/").defer_for == timedelta(hours=1)


@pytest.mark.parametrize(
    ("payload", "deferrable"), [('{"to":5}', True), ("[1]", False), ("{", False), ('"\\ud800"', False), ("5", False)]
)
def test_payload_that_is_no_object_is_never_deferred(payload: str, deferrable: bool) -> None:
    job = Job("id", "t", "q", payload, 1, 1, 5, 0, 0, 0, 0)
    assert Deferrals.is_deferrable(Failed(error="no", reason=Reason.PAYLOAD, retryable=False), job) is deferrable
    assert Deferrals.is_deferrable(Failed(error="no", reason=Reason.NO_HANDLER, retryable=False), job)
    assert not Deferrals.is_deferrable(Failed(error="no", reason=Reason.RESULT, retryable=False), job)


async def test_unreachable_store_keeps_the_beginning_of_the_deferral(
    app: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> None:
        raise Unavailable("away")

    monkeypatch.setattr(app, "open_store", away)
    job = Job("id", "t", "q", "{}", 1, 1, 5, 0, 0, 0, 0)
    failed = Failed(error="no", reason=Reason.NO_HANDLER, retryable=False)
    outcomes = await Deferrals(app).defer_or_fail([job], [failed], app.settings)
    assert outcomes == [Released(None, timedelta(seconds=2), Reason.NO_HANDLER)]
