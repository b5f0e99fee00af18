"""What a worker is called."""

from __future__ import annotations

from datetime import timedelta

from holdfast import Holdfast
from holdfast.job import Order, Pulse
from tests.worker.support import harness


async def test_a_named_worker_signs_its_jobs_and_others_mint_a_name(app: Holdfast) -> None:
    @app.task("quick")
    async def quick() -> None: ...

    names = []
    for given in ("mail-1", "minted", "minted"):
        async with harness(app, worker_id=given) as harnessed:
            job = await quick.enqueue()
            hand = await harnessed.start()
            await harnessed.run_until_idle()
            assert [each.pulse.worker for each in await app.workers()] == [hand.worker.id]
            names.append((await job.job()).worker)
    assert names[0] == "mail-1"
    assert len({*names, "minted"}) == 4


async def test_an_order_for_a_dead_worker_of_the_same_name_stops_nobody(app: Holdfast) -> None:
    @app.task("quick")
    async def quick() -> None: ...

    async with harness(app, worker_id="mail-1") as harnessed:
        store = await app.opened()
        dead = Pulse(worker="mail-1", host="here", pid=1, queues="*", concurrency=1)
        await store.beat(dead, [], lease_for=timedelta(seconds=30))
        assert await store.order(Order.STOP) == ["mail-1"]
        hand = await harnessed.start()
        await harnessed.advance(25)
        job = await quick.enqueue()
        await harnessed.run_until_idle()
        assert await job.state() == "succeeded"
        assert not hand.running.done()
