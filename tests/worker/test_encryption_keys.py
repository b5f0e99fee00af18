"""Encryption keys: rotation, workers and programs without a key, texts that were changed or moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from holdfast import (
    ConfigError,
    Conflict,
    Context,
    DecryptionFailed,
    Holdfast,
    HoldfastError,
    Invalid,
    JobFilter,
    JobState,
    RetryAfter,
    Unique,
)
from holdfast.app.overview import KeyUse
from holdfast.core.encryption import Codec, key_id_of
from holdfast.core.events import PayloadUnfit, StoreTrouble
from holdfast.core.schedule import ScheduleChange
from holdfast.integrations.cryptography import AesGcmCodec, new_key
from holdfast.views.explain import explain_job, job_facts
from tests.support.spoiling import spoil
from tests.worker.stepping import steps_of
from tests.worker.support import Recorder, harness

OLD, NEW, UNIQUE = new_key(), new_key(), new_key()
HAS_OLD, HAS_NEW = AesGcmCodec({"old": OLD}), AesGcmCodec({"new": NEW})
ROTATED = AesGcmCodec({"new": NEW, "old": OLD})


def _app(home: str, codec: Codec | None = None, readable: Sequence[str] = ()) -> Holdfast:
    """An application with tasks."""
    app = Holdfast(home, codec=codec, readable=readable)

    @app.task("mail.send")
    async def send(to: str) -> str:
        return f"sent to {to}"

    @app.task("order")
    async def order(context: Context, to: str) -> str:
        found: str = await context.step("ask", lambda: f"asked {to}")
        return f"{found}, told {await context.wait_for('approved', timeout='1d')}"

    return app


async def _submit(home: str, codec: Codec | None, *, task: str = "mail.send", **options: Any) -> str:
    async with _app(home, codec) as app:
        return (await app.enqueue(task, {"to": "ada"}, **options)).id


LACKING = {
    "no codec": (None, "this program has no codec"),
    "another key": (HAS_NEW, "which this program does not have"),
    "another key of this name": (AesGcmCodec({"old": NEW}), "or this program has another key under that id"),
}


@pytest.mark.parametrize("lacking", LACKING)
async def test_job_waits_without_an_attempt_for_a_worker_with_its_key(home: str, lacking: str) -> None:
    codec, text = LACKING[lacking]
    job_id = await _submit(home, HAS_OLD, max_attempts=1)
    app = _app(home, codec)
    events = Recorder(app)
    async with harness(app) as harnessed:
        await harnessed.start()
        await harnessed.advance(300)
        job = await app.get(job_id)
        assert (job.state, job.reason, job.attempts) == (JobState.SCHEDULED, "encrypted", 0)
        assert text in (job.error or "")
        [event] = events.of(PayloadUnfit)
        assert (event.job_id, "that key" in event.remedy) == (job_id, True)
        explanation, *_ = explain_job(job, await job_facts(app, job))
        assert explanation.remedy == "start workers whose application has a codec with that key"
    async with harness(_app(home, HAS_OLD)) as harnessed:
        await harnessed.start()
        await harnessed.advance(400)
        assert (await harnessed.app.get(job_id)).return_value() == "sent to ada"


async def test_job_without_its_key_is_dead_after_the_setting_and_replayable(home: str) -> None:
    job_id = await _submit(home, HAS_OLD)
    async with harness(_app(home), defer_for="10m") as harnessed:
        await harnessed.start()
        await harnessed.advance(605)
        dead = await harnessed.app.get(job_id)
        assert (dead.state, dead.reason) == (JobState.DEAD, "encrypted")
        await harnessed.app.replay(job_id)
    async with harness(_app(home, HAS_OLD)) as harnessed:
        await harnessed.run_until_idle()
        assert await harnessed.app.handle(job_id).result(timeout=0) == "sent to ada"


async def test_rotation_keeps_old_jobs_running_and_counts_them(home: str) -> None:
    async with _app(home, HAS_OLD) as app:
        plain = await _submit(home, None)
        first = await app.enqueue("order", {"to": "ada"})
        await app.schedules.add("daily", app.draft_job("mail.send", {"to": "bob"}), every="1d")
        await app.schedules.pause("daily")
        await app.signal("kept", "value")
    app = _app(home, ROTATED)
    async with harness(app) as harnessed:
        assert await app.count_encryption_keys() == [
            KeyUse(key_id=None, jobs=1),
            KeyUse(key_id="old", jobs=1, schedules=1, signals=1),
        ]
        second = await app.enqueue("order", {"to": "cyd"})
        await harnessed.start()
        await harnessed.advance(5)
        counted = {use.key_id: use.jobs for use in await app.count_encryption_keys()}
        assert counted == {"new": 2, "old": 1}  # the first job has a payload of the old key, and a step of the new one
        for _ in range(2):
            await app.signal("approved", "yes")
        await harnessed.advance(5)
        results = [await handle.result(timeout=0) for handle in map(app.handle, (first.id, second.id, plain))]
        assert results == ["asked ada, told yes", "asked cyd, told yes", "sent to ada"]
        assert await app.count_encryption_keys() == [KeyUse(key_id="old", schedules=1, signals=1)]


def _calling(home: str, codec: Codec) -> Holdfast:
    app = Holdfast(home, codec=codec)

    @app.task("part")
    async def part(word: str) -> str:
        return f"made {word}"

    @app.task("whole")
    async def whole(context: Context) -> list[str]:
        await context.call(part, "before")
        return await context.gather(context.call(part, "first"), context.call(part.options(queue="later"), "second"))

    return app


async def test_result_of_a_child_counts_until_its_parent_has_it(home: str) -> None:
    rotated = _calling(home, ROTATED)
    async with rotated:
        whole = await rotated.enqueue("whole", {}, queue="wholes")
    turns = [("wholes", ROTATED), ("default", ROTATED), ("wholes", ROTATED)]
    turns += [("default", AesGcmCodec({"old": OLD, "new": NEW})), ("later", ROTATED), ("wholes", ROTATED)]
    counted = []
    for queue, codec in turns:
        async with harness(_calling(home, codec), queues=queue) as harnessed:
            await harnessed.run_until_idle()
            counted.append([use.key_id for use in await harnessed.app.count_encryption_keys()])
    assert counted == [["new"], ["new"], ["new"], ["new", "old"], ["new", "old"], []]
    async with rotated:
        assert await rotated.handle(whole.id).result(timeout=0) == ["made first", "made second"]


async def test_result_is_read_once_its_key_is_there(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with harness(_app(home, HAS_OLD)) as harnessed:
        await harnessed.app.enqueue("mail.send", {"to": "ada"}, tags=["mails"])
        await harnessed.run_until_idle()
    app = _app(home, HAS_NEW)
    async with harness(app) as harnessed:
        await harnessed.advance(60)
        ended = await anext(app.stream_tag("mails"))
        with pytest.raises(DecryptionFailed, match=f"the result of job {ended.job.id} is encrypted with key 'old'"):
            ended.result()
        monkeypatch.setattr(app, "codec", ROTATED)
        assert ended.result() == "sent to ada"


async def test_step_without_its_key_is_not_run_again(home: str) -> None:
    job_id = await _submit(home, HAS_OLD, task="order")
    async with harness(_app(home, ROTATED)) as harnessed:
        await harnessed.start()
        await harnessed.advance(1)
        assert [step.name for step in await steps_of(harnessed.app, job_id)] == ["ask"]
    async with harness(_app(home, HAS_OLD)) as harnessed:
        await harnessed.app.signal("approved", "yes")
        await harnessed.start()
        await harnessed.advance(60)
        job = await harnessed.app.get(job_id)
        assert (job.state, job.reason, job.attempts) == (JobState.SCHEDULED, "encrypted", 0)
        assert "step 'ask' is [encrypted with key new]" in (job.error or "")
    async with harness(_app(home, ROTATED)) as harnessed:
        await harnessed.run_until_idle()
        assert await harnessed.app.handle(job_id).result(timeout=0) == "asked ada, told yes"


async def test_changed_and_moved_payloads_are_not_run(home: str) -> None:
    ids = [await _submit(home, HAS_OLD) for _ in range(5)]
    async with _app(home) as keyless:
        text = (await keyless.get(ids[0])).payload
    changed = text.replace('"data":"', '"data":"AAAA')
    damaged = {ids[1]: text, ids[2]: changed, ids[3]: '{"$encrypted":5}', ids[4]: text.replace('"data":"', '"data":"?')}
    for job_id, payload in damaged.items():
        spoil(home, job_id, payload=payload)
    async with harness(_app(home, HAS_OLD), defer_for="1s") as harnessed:
        await harnessed.run_until_idle()
        jobs = [await harnessed.app.get(job_id) for job_id in ids]
    assert [(job.state.value, job.reason) for job in jobs] == [("succeeded", None), *[("dead", "encrypted")] * 4]
    for job, error in zip(jobs[1:], ("moved from another", "was changed", "damaged", "not base64"), strict=True):
        assert error in (job.error or "")


async def test_schedule_waits_for_a_worker_with_its_key(home: str) -> None:
    async with _app(home, HAS_OLD) as app:
        await app.schedules.add("soon", app.draft_job("mail.send", {"to": "bob"}), every="5s", max_runs=1)
    keyless = _app(home)
    events = Recorder(keyless)
    async with harness(keyless) as harnessed:
        await harnessed.start()
        await harnessed.advance(30)
        assert "schedule soon cannot be run" in events.of(StoreTrouble)[0].error
        assert await keyless.count() == 0
    async with harness(_app(home, HAS_OLD)) as harnessed:
        await harnessed.start()
        await harnessed.advance(40)
        [job] = (await harnessed.app.find()).jobs
        assert job.return_value() == "sent to bob"


@pytest.mark.parametrize("readable", [[], ["to"]], ids=["none readable", "readable"])
async def test_schedule_whose_payload_is_damaged_is_paused_and_ends_no_worker(home: str, readable: list[str]) -> None:
    app = _app(home, HAS_OLD, readable)
    events = Recorder(app)
    async with harness(app) as harnessed:
        draft = app.draft_job("mail.send", {"to": "bob"})
        for name in ("paused", "late", "sound"):
            await app.schedules.add(name, draft, every="1h", catch_up=0)
        async with _app(home) as keyless:
            schedules = (await keyless.open_store()).schedules
            for name in ("paused", "late"):
                (known,) = await schedules.read_schedules(name)
                damaged = replace(known.job, payload=known.job.payload[:30])
                long_ago = (known.next_us or 0) - 5400 * 1_000_000  # a run that the worker is not to make up for
                assert await schedules.write_schedule(
                    ScheduleChange(replace(known, job=damaged, next_us=long_ago), known.revision)
                )
        assert (await app.schedules.pause("paused")).paused
        await harnessed.start()
        await harnessed.advance(3601)
        runs = {known.name: known.runs for known in await app.schedules.find_all()}
        assert runs == {"late": 0, "paused": 0, "sound": 1}
        (trouble,) = {event.error for event in events.of(StoreTrouble)}
        assert "late cannot be run: the payload of schedule late is [encrypted, and damaged]" in trouble


@pytest.mark.parametrize("codec", [HAS_NEW, None], ids=["another key", "no codec"])
async def test_program_without_the_key_changes_no_arguments(home: str, codec: Codec | None) -> None:
    job_id = await _submit(home, HAS_OLD)
    async with harness(_app(home, HAS_OLD)) as harnessed:
        await harnessed.run_until_idle()
    waiting_id, plain_id = await _submit(home, HAS_OLD), await _submit(home, None)
    async with Holdfast(home) as other:
        damaged_id = (await other.enqueue("elsewhere", {"$encrypted": 1})).id
    keyless = _app(home, codec)
    async with keyless:
        stored = await keyless.get(waiting_id)
        job = await keyless.get(job_id)
        assert (key_id_of(job.payload), key_id_of(job.result or "")) == ("old", "old")
        for refused in (
            keyless.handle(job_id).result(timeout=0),
            keyless.fork_job(job_id),
            keyless.fork_job(job_id, payload={"to": "eve"}),
            keyless.replay(job_id, force=True, payload={"to": "eve"}),
            keyless.edit(waiting_id, payload={"to": "eve"}),
        ):
            with pytest.raises(DecryptionFailed):
                await refused
        for read in (job.decode_arguments, job.return_value):
            with pytest.raises(DecryptionFailed, match="encrypted with key old"):
                read()
        assert (await keyless.edit(waiting_id, priority=5)).payload == stored.payload
        assert (await keyless.edit(plain_id, payload={"to": "eve"})).decode_arguments() == {"to": "eve"}
    async with _app(home, ROTATED) as keyed:
        assert (await keyed.edit(waiting_id, payload={"to": "bob"})).decode_arguments() == {"to": "bob"}
        assert (await keyed.edit(damaged_id, payload={"to": "bob"})).decode_arguments() == {"to": "bob"}


@pytest.mark.parametrize("codec", [HAS_NEW, None], ids=["another key", "no codec"])
async def test_repeated_submission_without_the_key_is_no_other_work(home: str, codec: Codec | None) -> None:
    job_id = await _submit(home, HAS_OLD, key="order-1")
    app = Holdfast(home, codec=codec, strict_idempotency=True)
    async with app:
        same, other = [app.draft_job(task, {"to": "ada"}, key="order-1") for task in ("mail.send", "order")]
        text = f"the payload of job {job_id}, for which key 'order-1' stands, is \\[encrypted with key old\\]"
        for repeated in (app.submit(same), app.enqueue_many([same])):
            with pytest.raises(DecryptionFailed, match=text):
                await repeated
        with pytest.raises(Conflict, match="with another task"):
            await app.submit(other)


async def test_unique_keys_need_a_secret_and_outlive_a_rotation(home: str) -> None:
    unique = Unique("active", by=["task", "args.to"])
    with pytest.raises(ConfigError, match="unique_secret"):
        await _submit(home, HAS_OLD, unique=unique)
    codecs = [AesGcmCodec({name: key}, unique_secret=UNIQUE) for name, key in (("old", OLD), ("new", NEW))]
    first, second = [await _submit(home, codec, unique=unique) for codec in codecs]
    assert first == second


async def test_limits_by_encrypted_arguments_are_refused(home: str) -> None:
    app = _app(home, HAS_OLD)
    async with app:
        places: list[dict[str, Any]] = [{"by": "args.to"}, {"weight": "args.to"}]
        for place in places:
            with pytest.raises(Invalid, match="readable"):
                await app.limits.add("mail", task="mail.send", concurrency=1, **place)
    async with Holdfast(home, codec=HAS_OLD, readable=["to"]) as app:
        await app.limits.add("mail", task="mail.send", by="args.to", concurrency=1)
        job = await app.enqueue("mail.send", {"to": "ada"})
        assert (await job.job()).partition == "mail=ada"


async def test_errors_of_holdfast_quote_no_encrypted_argument(home: str) -> None:
    word = "persimmon"
    async with Holdfast(home, codec=HAS_OLD) as app:
        given: list[tuple[str, dict[str, Any]]] = [("mail.send", {"to": [word]}), ("choose", {"color": word})]
        given += [("step", {"word": word}), ("forward", {"word": word}), ("again", {"word": word})]
        jobs = [await app.enqueue(task, payload, max_attempts=2) for task, payload in given]
    app = _app(home, HAS_OLD)
    events = Recorder(app)

    @app.task("choose")
    async def choose(color: Literal["red", "green"]) -> None: ...

    def ask(word: str) -> Literal["yes", "no"]:
        return word  # type: ignore[return-value]

    @app.task("step")
    async def step(context: Context, word: str) -> None:
        await context.step("ask", ask, word)

    @app.task("forward")
    async def forward(word: str) -> None:
        await app.enqueue("mail.send", {"to": [word]})

    @app.task("again")
    async def again(word: str) -> None:
        try:
            await forward(word)
        except Invalid:
            raise RetryAfter(5, "later")  # noqa: B904 - without "from", as many write it

    async with harness(app, defer_for="1s") as harnessed:
        await harnessed.run_until_idle()
        dead = [await app.get(job.id) for job in jobs]
        attempts = [(await app.attempts(job.id))[0] for job in jobs[-2:]]
    assert [job.reason for job in dead] == ["payload", "payload", "result", "max_attempts", "max_attempts"]
    errors = [str(job.error) for job in dead]
    assert "argument 'to' of task 'mail.send': [encrypted] is not valid; expected `str`, got `array`" in errors[0]
    assert "argument 'color' of task 'choose': [encrypted] is not valid; it does not fit the task" in errors[1]
    assert "argument 'to' of task 'mail.send': [encrypted] is not valid; expected `str`, got `array`" in errors[3]
    assert errors[4] == f"RetryAfter: later, after {errors[3]}"
    assert all((each.traceback or "").endswith(error) for each, error in zip(attempts, errors[3:], strict=True))
    assert not any(word in str(each) for each in (*errors, *attempts, *events.events))


class _Failing:
    """A codec whose key service may be away."""

    key_id = "old"
    decode = HAS_OLD.decode
    is_away = False

    def encode(self, text: bytes, context: bytes) -> bytes:
        if self.is_away:
            raise OSError("away")
        return HAS_OLD.encode(text, context)

    def hash_text(self, text: bytes) -> str:
        raise OSError("away")


async def test_result_that_cannot_be_encrypted_is_stored_nowhere(home: str) -> None:
    codec = _Failing()
    app = _app(home, codec)
    async with harness(app) as harnessed:
        job = await app.enqueue("mail.send", {"to": "ada"})
        codec.is_away = True
        await harnessed.run_until_idle()
        dead = await job.job()
        assert (dead.state, dead.reason, dead.result) == (JobState.DEAD, "result", None)
        assert dead.error == "the codec could not encrypt (OSError)"
        with pytest.raises(HoldfastError, match=r"could not encrypt \(OSError\)"):
            await app.enqueue("mail.send", {"to": "ada"})


async def test_unique_job_is_not_stored_while_its_key_cannot_be_hashed(home: str) -> None:
    async with _app(home, _Failing()) as app:
        with pytest.raises(HoldfastError, match=r"the codec could not hash a unique key \(OSError\)"):
            await app.enqueue("mail.send", {"to": "ada"}, unique="active")
        assert await app.count() == 0


async def test_worker_outlives_a_codec_that_fails(home: str) -> None:
    codec = _Failing()
    app = _app(home, codec)
    events = Recorder(app)
    async with harness(app) as harnessed:
        await app.schedules.add("daily", app.draft_job("mail.send", {"to": "ada"}), every="5s", max_runs=1)
        order = await app.enqueue("order", {"to": "ada"})
        codec.is_away = True
        await harnessed.start()
        await harnessed.advance(6)
        assert "schedule daily cannot be run: the codec could not" in events.of(StoreTrouble)[0].error
        assert (await order.job()).error == "HoldfastError: the codec could not encrypt (OSError)"
        codec.is_away = False
        await harnessed.advance(60)
        assert [step.name for step in await steps_of(app, order.id)] == ["ask"]
        assert (await app.find(JobFilter(tasks=("mail.send",)))).jobs[0].return_value() == "sent to ada"


async def test_command_jobs_are_encrypted_and_their_refusals_quote_nothing(home: str) -> None:
    async with Holdfast(home, codec=HAS_OLD, commands="shell") as app:
        refused = await app.enqueue("command", {"shell": "echo persimmon"})
    app = Holdfast(home, codec=HAS_OLD, commands="argv")
    async with harness(app) as harnessed:
        job = await app.run_command("echo", "persimmon")
        async with _app(home) as keyless:
            assert key_id_of((await keyless.get(job.id)).payload) == "old"
        await harnessed.run_until_idle()
        assert (await job.result(timeout=0))["stdout"] == "persimmon\n"
        error = (await app.get(refused.id)).error
        assert error == "Invalid: shell: [encrypted] is not valid; it does not fit the task, or this worker's settings"
