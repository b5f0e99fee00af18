"""What AtlasQueue plans for its second version, and the example has: limits, chains and groups. Named by rows."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import Invalid
from tests.examples.atlasqueue_support import QUEUE, Atlasqueue, starts
from tests.examples.common import until

pytestmark = pytest.mark.timeout(400)


@pytest.mark.rows("A50")
def test_rate_holds_within_a_tenth_over_all_workers(atlasqueue: Atlasqueue) -> None:
    """20 a second over ten seconds, by two workers. A busy machine only ever makes it slower: no round may be quicker,
    and the best of three is not slower."""
    rates = []
    with atlasqueue.workers(2) as workers:
        while len(rates) < 3 and not any(rate >= 18 for rate in rates):
            handles = [atlasqueue.post("test.paced") for _ in range(201)]
            began = sorted(handle.sync.result(timeout=90) for handle in handles)
            first = atlasqueue.value(FIRST, [handle.id for handle in handles])
            for number, instant in enumerate(began[20:], 20):
                assert number / (instant - first) <= 22, f"too many had begun when the {number}th did"
            rates.append(200 / (began[-1] - began[0]))
        assert max(rates) >= 18
        assert not any(worker.events("job_failed") for worker in workers)


FIRST = "select min(extract(epoch from started_at))::float from holdfast.jobs where id = any(%s::uuid[])"
"""When the first of some jobs was claimed: no turn was given before."""


@pytest.mark.rows("A50")
def test_turns_are_given_at_exactly_the_rate(atlasqueue: Atlasqueue) -> None:
    """By Redis' clock, 200 turns at once for two workers; a job that comes back has the turn it was given."""
    from atlasqueue.worker.limiter import Limiter

    from holdfast import Snooze

    async def ask(job_ids: list[str]) -> None:
        limiters = [Limiter(atlasqueue.variables["REDIS_URL"], QUEUE) for _ in range(2)]

        async def turn(number: int, job_id: str) -> None:
            with suppress(Snooze):
                await limiters[number % 2].turn("exact", 20, job_id)

        await asyncio.gather(*(turn(number, job_id) for number, job_id in enumerate(job_ids)))
        for limiter in limiters:
            await limiter.close()

    def turns(job_ids: list[str]) -> dict[str, int]:
        """The instants at which jobs may begin, in order; without those that have begun, and so are not noted."""
        noted = atlasqueue.command("MGET", *(f"{QUEUE}:turn:{job_id}" for job_id in job_ids))
        given = [(int(turn), job_id) for job_id, turn in zip(job_ids, noted, strict=True) if turn is not None]
        return {job_id: turn for turn, job_id in sorted(given)}

    asyncio.run(ask([str(number) for number in range(200)]))
    given = turns([str(number) for number in range(200)])
    assert len(given) > 100
    assert {later - sooner for sooner, later in pairwise(given.values())} == {50_000}
    last = list(given)[-20:]
    asyncio.run(ask(last))
    assert turns(last).items() <= given.items()


@pytest.mark.rows("A51")
def test_chain_runs_in_order_and_continues_after_a_retry(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.canvas import chain

    steps = [("test.echo", {"n": 1}), ("test.fail", {"times": 1}), ("test.echo", {"n": 3})]
    with atlasqueue.worker() as worker:
        for _ in range(2):  # the same chain, since it has the same key
            first = atlasqueue.app.run_blocking(chain(atlasqueue.app, *steps, key="order-42"))
        assert first.created is False
        atlasqueue.when_succeeded(3)
        order = "select type, payload::text, attempts from jobs order by updated_at"
        assert atlasqueue.sql(order) == [
            ("test.echo", '{"n":1}', 1),
            ("test.fail", '{"times":1}', 2),
            ("test.echo", '{"n":3}', 1),
        ]
    assert sum(starts([worker]).values()) == 4


@pytest.mark.rows("A51")
def test_continuation_runs_once_after_its_whole_group(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.canvas import group

    members = [("test.fail", {"times": number % 2}) for number in range(6)]
    with atlasqueue.workers(2) as workers:
        app = atlasqueue.app
        waiting = app.run_blocking(group(app, members, ("test.echo", {"all": "done"}), key="mailing-7"))
        waiting.sync.result(timeout=90)
        atlasqueue.when_succeeded(8)
        callback, *others = atlasqueue.sql("select id::text, type from jobs order by created_at desc")
        assert (callback[1], [kind for _, kind in others].count("test.echo")) == ("test.echo", 0)
        last = "select max(ended_at) from holdfast.jobs where task = 'test.fail'"
        assert atlasqueue.value("select started_at from holdfast.jobs where task = 'test.echo'") >= atlasqueue.value(
            last
        )
        failing = app.run_blocking(group(app, [("test.fail", {})], ("test.echo", {}), key="never"))
        atlasqueue.when(failing.id, "dead")
    assert starts(workers)[callback[0]] == 1


@pytest.mark.rows("A51")
def test_group_whose_member_has_a_taken_key_ends_dead(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.canvas import group

    app = atlasqueue.app
    app.sync.enqueue("test.echo", {}, key="mailing-8/0")
    waiting = app.run_blocking(group(app, [("test.echo", {})] * 2, ("test.echo", {}), key="mailing-8"))
    with atlasqueue.workers(1):
        atlasqueue.when(waiting.id, "dead")
    assert "are missing" in app.sync.get(waiting.id).error


@pytest.mark.rows("A49", "A51")
def test_followers_stay_in_the_queue_of_their_predecessor(atlasqueue: Atlasqueue) -> None:
    """By workers that serve that queue, and every queue. No sweep comes between."""
    from atlasqueue.canvas import chain, group

    app, steps = atlasqueue.app, [("noop", {})] * 3
    for queues in ("mail", "*"):
        with atlasqueue.worker(HOLDFAST_QUEUES=queues, WORKER_POLL_TIMEOUT="600"):
            app.run_blocking(chain(app, *steps, key=f"chain {queues}", queue="mail"))
            app.run_blocking(group(app, steps, ("test.echo", {}), key=f"group {queues}", queue="mail"))
            atlasqueue.when_succeeded(8 if queues == "mail" else 16)
    assert atlasqueue.sql("select queue, count(*) from holdfast.jobs group by 1") == [("mail", 16)]


@pytest.mark.rows("A51")
def test_chain_and_group_refuse_what_cannot_be_right(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.canvas import chain, group

    app = atlasqueue.app
    with pytest.raises(ValueError, match="a chain needs a step"):
        app.run_blocking(chain(app, key="k"))
    for key, problem in (("k" * 95, "at most 94 characters"), ("", "visible")):
        with pytest.raises(Invalid, match=f"^key: .* {problem}"):
            app.run_blocking(group(app, [("noop", {})], ("noop", {}), key=key))
    assert atlasqueue.value("select count(*) from jobs") == 0
    assert app.run_blocking(group(app, [("noop", {})], ("noop", {}), key="k" * 94)).created


def _step(**changed: Any) -> dict[str, Any]:
    step = {"type": "noop", "payload": {}} | changed
    return {name: value for name, value in step.items() if value is not None}


BAD_CHAINS: list[tuple[str, Any]] = [
    ("metadata.then", {"type": "noop", "payload": {}}),
    ("metadata.then", "noop"),
    ("metadata.then", [_step()] * 101),
    ("metadata.then[0]", ["noop"]),
    ("metadata.then[0].type", [_step(type=None)]),
    ("metadata.then[0].type", [_step(type="no name")]),
    ("metadata.then[0].type", [_step(type=5)]),
    ("metadata.then[1].payload", [_step(), _step(payload=None)]),
    ("metadata.then[2].payload", [_step(), _step(), _step(payload=["x"])]),
    ("metadata.then[0].max_attempts", [_step(max_attempts=3)]),
]


@pytest.mark.rows("A51")
def test_invalid_chain_is_refused_at_submission(atlasqueue: Atlasqueue) -> None:
    with atlasqueue.api() as api:
        for field, then in BAD_CHAINS:
            answer = api.post(metadata={"then": then})
            assert (answer.status_code, answer.json().get("field")) == (422, field), answer.text
            assert answer.json()["remedy"]
        batch = {"jobs": [{"task": "noop", "payload": {}, "key": "k", "metadata": {"then": [{"type": "noop"}]}}]}
        answer = api.client.post("/holdfast/v1/jobs/batch", json=batch)
        assert (answer.status_code, answer.json()["field"]) == (422, "jobs[0].metadata.then[0].payload")
        assert atlasqueue.value("select count(*) from jobs") == 0
        assert api.post(metadata={"then": [_step()] * 100}).status_code == 201


CHAINED = """select id::text from holdfast.submit('[{"task": "test.echo", "payload": {}, "key": "chained",
    "metadata": {"then": [{"type": "noop"}]}}]')"""


@pytest.mark.rows("A51")
def test_invalid_chain_from_sql_ends_dead_unrun(atlasqueue: Atlasqueue) -> None:
    job_id = atlasqueue.value(CHAINED)
    with atlasqueue.worker():
        row = atlasqueue.when(job_id, "dead")
    assert (row["attempts"], "metadata.then[0].payload" in row["last_error"]) == (1, True)
    assert atlasqueue.value("select result from holdfast.job where id = %s", job_id) is None


BLOCKED = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


@pytest.mark.rows("A51")
def test_chain_link_appears_only_with_its_predecessors_success(atlasqueue: Atlasqueue, tmp_path: Path) -> None:
    """A lock keeps the success from being written. The worker is killed meanwhile."""
    from atlasqueue.canvas import chain

    steps = [("test.wait", {"until": str(tmp_path / "open")}), ("test.echo", {"n": 2}), ("test.echo", {"n": 3})]
    with atlasqueue.worker() as killed:
        first = atlasqueue.app.run_blocking(chain(atlasqueue.app, *steps, key="order-42"))
        atlasqueue.when(first.id, "running")
        with psycopg.connect(atlasqueue.url) as holder:
            holder.execute("select from holdfast.job where id = %s for update", [first.id])
            (tmp_path / "open").touch()
            until(lambda: atlasqueue.value(BLOCKED) > 0, "a success that waits for the lock")
            assert atlasqueue.value("select count(*) from jobs") == 1
            killed.kill()
    assert atlasqueue.sql("select status from jobs") == [("running",)]
    atlasqueue.sql("update holdfast.job set lease_until = 0 where state = 2")  # half a minute goes by
    with atlasqueue.worker() as worker:
        atlasqueue.when_succeeded(3)
    assert sorted(starts([worker]).values()) == [1, 1, 1]
    assert atlasqueue.sql("select attempts from jobs order by created_at") == [(2,), (1,), (1,)]


@pytest.mark.rows("A51")
def test_chain_goes_on_without_waiting_for_a_sweep(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.canvas import chain

    with atlasqueue.worker(WORKER_POLL_TIMEOUT="600"):
        atlasqueue.app.run_blocking(chain(atlasqueue.app, *[("noop", {})] * 5, key="quick"))
        atlasqueue.when_succeeded(5)


@pytest.mark.rows("A51")
def test_handler_that_completes_its_job_is_told_that_the_next_is_lost(atlasqueue: Atlasqueue) -> None:
    from atlasqueue.canvas import chain

    with atlasqueue.worker() as worker:
        first = atlasqueue.app.run_blocking(chain(atlasqueue.app, ("test.complete", {}), ("noop", {}), key="own"))
        (lost,) = worker.wait_for_events("next_job_lost")
    assert (lost["level"], lost["job_id"], lost["next"]) == ("error", first.id, "noop")
    assert atlasqueue.sql("select status from jobs") == [("succeeded",)]
