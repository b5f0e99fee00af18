"""What AtlasQueue plans for its second version, and the example has: limits, chains and groups. Named by rows."""

from __future__ import annotations

import pytest

from tests.examples.atlasqueue_support import Atlasqueue, starts
from tests.examples.common import until

pytestmark = pytest.mark.timeout(400)


def test_a50_a_rate_holds_over_all_workers(atlasqueue: Atlasqueue) -> None:
    """20 a second, of 80 at once, over two workers. A machine that is busy with other tests gets more chances."""

    def rate() -> float:
        handles = [atlasqueue.post("test.paced") for _ in range(80)]
        began = sorted(handle.sync.result(timeout=90) for handle in handles)
        return (len(began) - 1) / (began[-1] - began[0])

    with atlasqueue.workers(2) as workers:
        until(lambda: 18 <= rate() <= 22, "20 a second, give or take a tenth")
        assert len(starts(workers)) >= 80
        assert not any(worker.events("job_failed") for worker in workers)


def test_a51_a_chain_runs_in_order_and_goes_on_after_what_failed(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.canvas import chain

    steps = [("test.echo", {"n": 1}), ("test.fail", {"times": 1}), ("test.echo", {"n": 3})]
    with atlasqueue.worker() as worker:
        for _ in range(2):  # the same chain, since it has the same key
            first = atlasqueue.app.block(chain(atlasqueue.app, *steps, key="order-42"))
        assert first.created is False
        atlasqueue.when_succeeded(3)
        order = "select type, payload::text, attempts from jobs order by updated_at"
        assert atlasqueue.sql(order) == [
            ("test.echo", '{"n":1}', 1),
            ("test.fail", '{"times":1}', 2),
            ("test.echo", '{"n":3}', 1),
        ]
    assert sum(starts([worker]).values()) == 4


def test_a51_what_follows_a_group_runs_once_after_all_of_it(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.canvas import group

    members = [("test.fail", {"times": number % 2}) for number in range(6)]
    with atlasqueue.workers(2) as workers:
        app = atlasqueue.app
        waiting = app.block(group(app, members, ("test.echo", {"all": "done"}), key="mailing-7"))
        waiting.sync.result(timeout=90)
        atlasqueue.when_succeeded(8)
        callback, *others = atlasqueue.sql("select id::text, type from jobs order by created_at desc")
        assert (callback[1], [kind for _, kind in others].count("test.echo")) == ("test.echo", 0)
        last = "select max(ended_at) from holdfast.jobs where task = 'test.fail'"
        assert atlasqueue.value("select started_at from holdfast.jobs where task = 'test.echo'") >= atlasqueue.value(
            last
        )
        failing = app.block(group(app, [("test.fail", {})], ("test.echo", {}), key="never"))
        atlasqueue.when(failing.id, "dead")
    assert starts(workers)[callback[0]] == 1
