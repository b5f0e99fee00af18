"""``holdfast.submit``: for any language, a trigger, a psql prompt. It refuses what the table and its types refuse."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from holdfast import Holdfast, JobFilter, JobState, Retry
from holdfast.worker import Worker
from tests.external_tx.kinds import plain
from tests.external_tx.support import Place
from tests.support.postgres import FLOOR, shared

Rows = list[Any]


def submit(place: Place, jobs: object) -> Rows:
    """Submit JSON text, or what JSON can hold."""
    text = jobs if isinstance(jobs, str) else json.dumps(jobs, ensure_ascii=False)
    return place.execute("select * from SCHEMA.submit(%s)", text)


def test_every_field_is_what_it_is_in_python(place: Place) -> None:
    fields: dict[str, Any] = {
        "queue": "q",
        "priority": -3,
        "delay": 90,
        "key": "k",
        "key_for": 3600,
        "max_attempts": None,
        "timeout": 1.5,
        "tags": ["a", "b"],
        "metadata": {"m": "␀", "n": [1]},
    }
    python = place.app.sync.enqueue("work", {"n": 1}, retry="exponential", **fields | {"key": "p"})
    retry = Retry.exponential().to_builtins()
    ((job_id, created),) = submit(place, [{"task": "work", "payload": {"n": 1}, "retry": retry, **fields}])

    first, second = place.app.sync.get(python.id), place.app.sync.get(str(job_id))
    assert created
    assert json.loads(second.payload) == {"n": 1}
    for field in ("task", "queue", "priority", "max_attempts", "state", "options", "attempts", "claims"):
        assert getattr(first, field) == getattr(second, field), field
    assert second.run_at - second.created_at == timedelta(seconds=90)
    assert (second.key, place.app.sync.get("key:k").id) == ("k", second.id)
    kept = place.execute("select keep_until from SCHEMA.key order by key")
    assert abs(kept[0][0] - kept[1][0]) < 60_000_000


def test_given_id_begins_its_claims_as_in_python(place: Place) -> None:
    own, plain_id = str(uuid4()), str(uuid4())
    python = place.app.sync.get(place.app.sync.enqueue("work", id=plain_id).id)
    submit(place, [{"task": "work", "id": own}])
    ((minted, _),) = submit(place, [{"task": "work"}])
    job = place.app.sync.get(own)
    assert 0 < python.claims <= job.claims < python.claims + 60_000_000
    assert place.app.sync.get(str(minted)).claims == 0


def test_a_plain_job_has_the_defaults(place: Place) -> None:
    ((job_id, _),) = submit(place, [{"task": "work"}])
    python = place.app.sync.get(place.app.sync.enqueue("work").id)
    job = place.app.sync.get(str(job_id))
    for field in ("payload", "queue", "priority", "max_attempts", "state", "options", "key"):
        assert getattr(python, field) == getattr(job, field), field
    assert job.run_at == job.created_at


PAYLOADS: list[dict[str, Any]] = [
    {"z": 1, "a": 2},
    {"big": 10**4000},
    {"all": "".join(map(chr, range(1, 32)))},
    {"symbol": "␀", "doubled": "␀␀", "zero": "␀0"},
    {"text": 'é 😀 " \\ /'},
    {"deep": [[[{"n": None}]]]},
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_payload_keeps_its_value(place: Place, payload: dict[str, Any]) -> None:
    ((job_id, _),) = submit(place, [{"task": "work", "payload": payload, "tags": ["t"], "metadata": {"a": "␀"}}])
    job = place.app.sync.get(str(job_id))
    assert (json.loads(job.payload), job.options_or_default.metadata) == (payload, {"a": "␀"})


def test_one_object_is_one_job(place: Place) -> None:
    ((job_id, created),) = submit(place, {"task": "work", "key": "␀"})
    assert created
    assert place.app.sync.get("key:␀").id == str(job_id)


def test_answers_come_in_the_order_of_the_jobs(place: Place) -> None:
    rows = submit(place, [{"task": "work", "key": key} for key in ("z", "a", "z")] + [{"task": "work"}])
    assert [row[1] for row in rows] == [True, True, False, True]
    assert rows[0][0] == rows[2][0]
    assert submit(place, [{"task": "work", "key": "a"}]) == [(rows[1][0], False)]
    assert submit(place, [{"task": "work", "id": str(rows[3][0]).upper()}]) == [(rows[3][0], False)]
    assert submit(place, []) == []
    assert place.jobs() == 3


def test_ids_are_of_their_time_and_in_order(place: Place) -> None:
    before = datetime.now(UTC)
    ids = [row[0] for row in submit(place, [{"task": "work"}] * 5000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 5000
    assert {(each.version, each.variant) for each in ids} == {(7, "specified in RFC 4122")}
    minted = datetime.fromtimestamp((ids[0].int >> 80) / 1000, UTC)
    assert abs(minted - before) < timedelta(minutes=1)


BAD: list[tuple[object, str]] = [
    ("null", "null value in column"),
    ("[", "invalid input syntax for type json"),
    ([{}], 'null value in column "task"'),
    ([{"task": "ok"}, {"task": None}], 'null value in column "task"'),
    ([{"task": "a", "priority": 1_000_001}], "job_rank_check"),
    ([{"task": "a", "priority": 1.5}], "invalid input syntax for type integer"),
    ([{"task": "a", "delay": "soon"}], "invalid input syntax for type numeric"),
    ('[{"task":"a","delay":1e400}]', "out of range"),
    ([{"task": "a", "run_at": "2030-02-30T00:00:00Z"}], "date/time field value out of range"),
    ([{"task": "a", "max_attempts": "many"}], "invalid input syntax for type bigint"),
    ([{"task": "a", "id": "x"}], "invalid input syntax for type uuid"),
    ([{"task": "a", "payload": {"a": "\0"}}], "unsupported Unicode escape sequence"),
    ([{"task": "a", "tags": "x"}], "malformed array literal"),
]


@pytest.mark.parametrize(("jobs", "given"), BAD, ids=range(len(BAD)))
def test_invalid_jobs_are_refused_whole(place: Place, jobs: object, given: str) -> None:
    with pytest.raises(psycopg.Error) as caught:
        submit(place, jobs)
    assert given in (caught.value.diag.message_primary or "")
    assert place.jobs() == 0


@pytest.mark.parametrize("text", ["a", "ü", "日本", "😀", "a b", "a/b?c", "x" * 512, "\u00e9", "e\u0301"])
def test_keys_and_tags_that_python_takes_are_taken(place: Place, text: str) -> None:
    ((job_id, _),) = submit(place, [{"task": "work", "key": text, "tags": [text[:100]]}])
    job = place.app.sync.get(f"key:{text}")
    assert (job.id, job.options_or_default.tags) == (str(job_id), (text[:100],))


def test_submission_by_trigger_follows_the_transaction(place: Place) -> None:
    place.execute("""
        create function SCHEMA.made() returns trigger language plpgsql as $$
        begin
            perform SCHEMA.submit(jsonb_build_array(jsonb_build_object(
                'task', 'work', 'payload', jsonb_build_object('n', new.n), 'key', 'row ' || new.n)));
            return new;
        end $$""")
    place.execute("create trigger made after insert on TABLE for each row execute function SCHEMA.made()")
    with psycopg.connect(plain(place.url)) as connection:
        connection.execute(place.insert.encode())
        connection.rollback()
        assert place.both() == (0, 0)
        connection.execute("set search_path = nowhere")
        connection.execute(place.insert.replace("into ", "into public.").encode())
    assert place.both() == (1, 1)
    assert place.app.sync.get("key:row 1").payload == '{"n": 1}'


def test_submission_by_sql_wakes_a_worker(place: Place) -> None:
    @place.app.task("work")
    async def work(n: int) -> int:
        return n

    async def worked() -> None:
        async with place.app:
            worker = Worker(place.app, settings=place.app.settings.replace_values(poll="10m"))
            working = asyncio.create_task(worker.run())
            await asyncio.sleep(0.3)
            ((job_id, _),) = submit(place, [{"task": "work", "payload": {"n": 7}, "delay": 0.1}])
            assert await place.app.handle(str(job_id)).result(timeout=40) == 7
            worker.stop()
            await working

    asyncio.run(worked())


def test_id_of_zeros_is_found_like_any_other(place: Place) -> None:
    zeros = "00000000-0000-0000-0000-000000000000"
    ((job_id, _),) = submit(place, [{"task": "work", "id": zeros}])
    assert place.app.sync.cancel(str(job_id)).changed
    found = place.app.sync.find(JobFilter(states=[JobState.CANCELLED]))
    assert [job.id for job in found.jobs] == [zeros]


def test_the_older_server_does_the_same() -> None:
    server = shared(FLOOR)
    with server.fresh_schema() as schema:
        app = Holdfast(server.url(schema=schema))
        app.sync.count()
        jobs = '[{"task":"work","payload":{"n":1},"tags":["a"],"timeout":60}]'
        submitting = "select * from SCHEMA.submit(%s)".replace("SCHEMA", schema)
        ((job_id, created),) = server.execute(submitting, jobs, database="app")
        job = app.sync.get(str(job_id))
        assert (created, job.state, job.payload) == (True, JobState.QUEUED, '{"n": 1}')
        assert job.options_or_default.timeout == 60
        app.sync.close()
