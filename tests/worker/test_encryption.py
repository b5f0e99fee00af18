"""Plain text of payloads, results, steps and signals is in no byte of any store."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import pytest

from holdfast import Context, Holdfast, JobState, QueueFull, Retry, RetryAfter, Unique
from holdfast.integrations.cryptography import AesGcmCodec, new_key
from tests.support.store_bytes import read_store
from tests.worker.support import harness

NEW, UNIQUE = new_key(), new_key()
WORD = "persimmon"


def _register_order(app: Holdfast, pad: str) -> None:
    failing = iter([True])

    @app.task("child")
    async def child(context: Context, word: str) -> str:
        return f"{word} child result {pad}"

    @app.task("order", retry=Retry.fixed(1), max_attempts=2)
    async def order(context: Context, word: str, tenant: str) -> str:
        await context.step("reserve", lambda: f"{word} of a step {pad}")
        await context.state.save({"saved": f"{word} {pad}"})
        async for _ in context.iterate(lambda after: [word] if after is None else [], cursor=lambda row: row, every=1):
            pass
        if next(failing, False):
            raise RuntimeError("failed once")
        approval = await context.wait_for("approved", timeout="1d")
        return f"{word} {approval} {await context.call(child, f'{word} of a child')} {pad}"

    @app.task("search", unique=Unique("active", by=["task", "queue", "args.word"], on_conflict="replace"))
    async def search(word: str, page: int) -> str:
        return f"{word} on page {page}"


@pytest.mark.parametrize("pad", ["", "x" * 70_000], ids=["small", "large"])
async def test_plain_text_is_nowhere_in_the_store(home: str, pad: str) -> None:
    app = Holdfast(home, codec=AesGcmCodec({"new": NEW}, unique_secret=UNIQUE), readable=["tenant"])
    _register_order(app, pad)
    async with harness(app) as harnessed:
        await app.limits.add("tenants", queue="default", by="args.tenant", concurrency=9)
        await app.schedules.add("daily", app.draft_job("search", {"word": WORD, "page": 0}), every="1h", max_runs=1)
        payload = {"word": f"{WORD} {pad}", "tenant": "acme"}
        order = await app.enqueue("order", payload, tags=["visible"], key="invoice-7", expires=3600)
        edited = await app.enqueue("child", {"word": WORD}, delay=3600)
        await app.edit(edited.id, payload={"word": f"{WORD} edited"})
        first, second = [await app.enqueue("search", {"word": WORD, "page": page}, delay=60) for page in (1, 2)]
        batch = await app.enqueue_batch([app.draft_job("child", {"word": WORD})])
        await harnessed.start()
        await harnessed.advance(30)
        assert (await order.job()).state is JobState.WAITING
        for topic in ("approved", "kept"):
            await app.signal(topic, f"{WORD} signal")
        await harnessed.advance(2 * 3600)
        assert await first.result(timeout=0) == f"{WORD} on page 2"
        fork = await app.fork_job(order.id, from_step="wait_for approved")
        await app.replay(first.id, force=True, payload={"word": f"{WORD} again", "page": 3})
        await harnessed.advance(5)
        assert WORD in await order.result(timeout=0)
        assert (await edited.job()).payload == f'{{"word":"{WORD} edited"}}'
        assert (second.id, second.changed) == (first.id, True)
        assert await first.result(timeout=0) == f"{WORD} again on page 3"
        assert (await anext(app.stream_tag("visible"))).result() == await order.result(timeout=0)
        assert await batch.state() is JobState.SUCCEEDED
        assert (await fork.job()).state is JobState.WAITING
        assert [signal.value for signal in await app.kept_signals("kept")] == [f'"{WORD} signal"']
        assert (await app.saved_values(order.id)).state == {"saved": f"{WORD} {pad} {pad}"}
        assert (await app.schedules.get("daily")).job.payload == f'{{"word":"{WORD}","page":0}}'
    async with Holdfast(home) as keyless:
        job = await keyless.get("key:invoice-7")
        assert (job.id, (job.expires_at or job.created_at) - job.created_at) == (order.id, timedelta(hours=1))
    found = read_store(home)
    unique_text = f'{{"args.word":"{WORD}","queue":"default","task":"search"}}'
    assert hashlib.sha256(unique_text.encode()).hexdigest().encode() not in found
    assert WORD.encode() not in found
    for readable in (b"visible", b"invoice-7", b"acme", b"reserve", b"failed once", b"approved", b'"new"'):
        assert readable in found.replace(b'\\"', b'"'), readable


async def test_limit_by_an_encrypted_argument_knows_one_value(home: str) -> None:
    """Null, of all jobs: an operator made it, without the application."""
    app = Holdfast(home, codec=AesGcmCodec({"new": NEW}))

    @app.task("treat", queue="care", max_attempts=1)
    async def treat(patient: str) -> None:
        raise RetryAfter(60, scope="key")

    @app.task("admit", max_attempts=1)
    async def admit(patient: str) -> None:
        await app.enqueue_many([treat.new_job(patient) for _ in range(4)])

    async with Holdfast(home) as operator:
        await operator.limits.add("quota", queue="care", by="args.patient", depth=3)
    async with harness(app) as harnessed:
        first = await treat.enqueue(WORD)
        for number in range(2):
            await treat.enqueue(f"{WORD} {number}")
        with pytest.raises(QueueFull, match="limit quota is full for null: 3 of 3 jobs wait"):
            await treat.enqueue("another")
        refused = await admit.enqueue(WORD)
        await harnessed.start()
        await harnessed.advance(5)
        assert "QueueFull: limit quota is full for null" in str((await refused.job()).error)
        assert str((await first.job()).error).endswith("paused: quota=null")
        await harnessed.advance(300)
    assert WORD.encode() not in read_store(home)


async def test_pause_by_key_is_of_the_bucket_that_the_job_is_in(home: str) -> None:
    """A job in the clear has one of its own, beside that of all encrypted jobs; and no pause needs the codec."""
    app = Holdfast(home, codec=AesGcmCodec({"new": NEW}))

    @app.task("treat", queue="care")
    async def treat(patient: str) -> str:
        if patient == "acme":
            raise RetryAfter(600, scope="key")
        return patient

    async with Holdfast(home) as operator:
        await operator.limits.add("quota", queue="care", by="args.patient", concurrency=1)
        in_clear = await operator.enqueue("treat", {"patient": "acme"}, queue="care")
        async with harness(app) as harnessed:
            encrypted = await treat.enqueue("bob")
            await harnessed.start()
            await harnessed.advance(5)
            assert str((await app.get(in_clear.id)).error).endswith("paused: quota=acme")
            assert (await encrypted.job()).state is JobState.SUCCEEDED


async def test_pause_finds_a_limit_that_another_process_has_just_added(home: str) -> None:
    app = Holdfast(home)

    @app.task("treat", queue="care")
    async def treat(patient: str) -> None:
        raise RetryAfter(600, scope="key")

    async with Holdfast(home) as operator, harness(app) as harnessed:
        await treat.enqueue("first")
        await harnessed.start()
        await harnessed.advance(5)
        await operator.limits.add("quota", queue="care", by="args.patient", concurrency=1)
        second = await operator.enqueue("treat", {"patient": "acme"}, queue="care")
        await harnessed.advance(5)
        assert str((await app.get(second.id)).error).endswith("paused: quota=acme")
