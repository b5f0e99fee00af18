"""``holdfast.submit``: for any language, a trigger, a psql prompt. The same jobs, the same limits."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.errors import InvalidParameterValue

from holdfast import Holdfast, JobState, Retry
from holdfast.core.errors import Invalid
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
        "delay": "90s",
        "key": "k",
        "key_for": 3600,
        "max_attempts": None,
        "timeout": 1.5,
        "tags": ["a", "b"],
        "metadata": {"m": "\0␀", "n": [1]},
    }
    python = place.app.sync.enqueue("work", {"n": 1}, retry="exponential", **fields | {"key": "p", "delay": 90})
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


def test_given_id_is_marked_as_in_python(place: Place) -> None:
    own = str(uuid4())
    python = place.app.sync.enqueue("work", tags=["a"], id=str(uuid4()))
    submit(place, [{"task": "work", "tags": ["a"], "id": own}, {"task": "work", "id": str(uuid4())}, {"task": "work"}])
    assert place.app.sync.get(own).options == place.app.sync.get(python.id).options
    kept = place.execute("select options::text from SCHEMA.job where options is not null order by seq")
    assert [text for (text,) in kept] == ['{"given_id":true,"tags":["a"]}'] * 2 + ['{"given_id":true}']


def test_a_plain_job_has_the_defaults(place: Place) -> None:
    ((job_id, _),) = submit(place, [{"task": "work"}])
    python = place.app.sync.get(place.app.sync.enqueue("work").id)
    job = place.app.sync.get(str(job_id))
    for field in ("payload", "queue", "priority", "max_attempts", "state", "options", "key"):
        assert getattr(python, field) == getattr(job, field), field
    assert job.run_at == job.created_at


PAYLOADS = [
    '{"z":1,"a":2}',
    '{ "spaced" : [1, 2 ] }',
    '{"big":' + "9" * 4300 + "}",
    '{"nul":"\\u0000","twice":"\\u0000\\u0000","literal":"\\\\u0000","all":"\\\\\\u0000"}',
    '{"all":"' + "".join(f"\\u{n:04x}" for n in range(31)) + '"}',
    '{"symbol":"␀","doubled":"␀␀","zero":"␀0"}',
    '{"text":"é 😀 \\ud83d\\ude00 \\" \\\\ / \\/"}',
    '{"float":1.10,"exponent":1E2}',
    '{"deep":' + "[" * 63 + "]" * 63 + "}",
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_a_payload_is_kept_to_the_letter(place: Place, payload: str) -> None:
    ((job_id, _),) = submit(place, f'[{{"task":"work","payload":{payload}}}]')
    assert place.app.sync.get(str(job_id)).payload == payload
    batch = f'[{{"task":"work","payload":{payload},"tags":["t"],"metadata":{{"a":"\\u0000"}}}}]'
    ((job_id, _),) = submit(place, batch)
    assert place.app.sync.get(str(job_id)).payload == payload


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
    ("{}", "give an array"),
    ("null", "give an array"),
    ([1], "job 1: job: 1 is not valid"),
    ([{"task": "ok"}, {"task": "a b"}], 'job 2: task: "a b" is not valid; use 1 to 128'),
    ([{}], "task: null is not valid; name a task"),
    ([{"task": None}], "name a task"),
    ([{"task": 5}], "task: 5 is not valid"),
    ([{"task": "a", "nope": 1}], "field: nope is not valid; give each once of"),
    ('[{"task":"a","task":"b"}]', "give each once"),
    ([{"task": "a", "queue": "Ä"}], "queue: "),
    ([{"task": "a", "queue": 5}], "queue: 5"),
    ([{"task": "a", "payload": []}], "payload: [] is not valid; give an object"),
    ([{"task": "a", "payload": {"a": "x" * 262_144}}], "payload: 262153 bytes is not valid; give at most 262144 bytes"),
    ('[{"task":"a","payload":' + '{"a":' * 65 + "1" + "}" * 65 + "}]", "nested deeper than 64 levels"),
    ('[{"task":"a","payload":{"n":' + "1" * 4301 + "}}]", "more than 4300 digits"),
    ('[{"task":"a","payload":{"a":"\\ud800"}}]', "low surrogate"),
    ([{"task": "a", "priority": 101}], "priority: 101 is not valid; give a whole number from -100 to 100"),
    ([{"task": "a", "priority": 1.5}], "priority: 1.5"),
    ([{"task": "a", "priority": "1"}], "priority: "),
    ([{"task": "a", "delay": -1}], "delay: -1 is not valid; give seconds, or a span"),
    ([{"task": "a", "delay": "soon"}], 'delay: "soon"'),
    ('[{"task":"a","delay":1e400}]', "delay: 1e400"),
    ([{"task": "a", "delay": True}], "delay: true"),
    ([{"task": "a", "delay": "999999d"}], "of at most 64050 days"),
    ([{"task": "a", "run_at": "2030-01-31"}], 'run_at: "2030-01-31" is not valid; give a date, a time and an offset'),
    ([{"task": "a", "run_at": "2030-02-30T00:00:00Z"}], "run_at: "),
    ([{"task": "a", "run_at": "1999-01-01T00:00:00Z"}], "from the year 2000"),
    ([{"task": "a", "run_at": 5}], "run_at: 5"),
    ([{"task": "a", "delay": 1, "run_at": "2030-01-31T00:00:00Z"}], "give delay or run_at, not both"),
    ([{"task": "a", "key": ""}], "key: "),
    ([{"task": "a", "key": "x\0"}], "key: "),
    ([{"task": "a", "key": "\u200bx"}], "invisible characters"),
    ([{"task": "a", "key": "\u202ex"}], "bidirectional"),
    ([{"task": "a", "key": "\u0301x"}], "combining mark"),
    ([{"task": "a", "key": "x" * 513}], "give 1 to 512 visible characters"),
    ([{"task": "a", "key": 5}], "key: 5 is not valid; give text"),
    ([{"task": "a", "max_attempts": 0}], "max_attempts: 0 is not valid; give a whole number from 1 to 25"),
    ([{"task": "a", "timeout": 0}], "timeout: 0"),
    ([{"task": "a", "timeout": "31d"}], "of at most 30 days"),
    ([{"task": "a", "retry": {"bases": 1}}], "retry.bases: 1 is not valid; give [1, 5, 25]"),
    ([{"task": "a", "retry": "fixed:1"}], "retry: "),
    ([{"task": "a", "retry": [-1]}], "retry.delay: -1"),
    ([{"task": "a", "retry": []}], "retry: []"),
    ([{"task": "a", "retry": {"jitter": "ful"}}], "retry.jitter: "),
    ([{"task": "a", "tags": "x"}], "tags: "),
    ([{"task": "a", "tags": [None]}], "tags: "),
    ([{"task": "a", "tags": ["x" * 101]}], "give 1 to 100 visible characters"),
    ([{"task": "a", "metadata": [1]}], "metadata: [1]"),
    ([{"task": "a", "metadata": {"a": "x" * 16_384}}], "metadata: "),
    ([{"task": "a", "id": "x"}], 'id: "x" is not valid; give a UUID'),
    ([{"task": "a"}] * 10_001, "at most 10000"),
]


@pytest.mark.parametrize(("jobs", "said"), BAD, ids=range(len(BAD)))
def test_invalid_jobs_are_refused_whole_in_one_line(place: Place, jobs: object, said: str) -> None:
    with pytest.raises(InvalidParameterValue) as caught:
        submit(place, jobs)
    message = caught.value.diag.message_primary or ""
    assert said in message
    assert "\n" not in message
    assert place.jobs() == 0


@pytest.mark.parametrize(("jobs", "said"), BAD, ids=range(len(BAD)))
def test_python_refuses_the_same(place: Place, jobs: Any, said: str) -> None:
    if jobs == [{"task": "a", "retry": "fixed:1"}]:
        return  # Python reads more spellings
    if isinstance(jobs, str) or len(jobs) > 2 or not isinstance(jobs[-1], dict) or "task" not in jobs[-1]:
        return  # no call of Python's says this
    said_of = dict(jobs[-1])
    with pytest.raises(Invalid):
        place.app.draft_job(said_of.pop("task"), said_of.pop("payload", {}), **said_of)


@pytest.mark.parametrize("text", ["a", "ü", "日本", "😀", "a b", "a/b?c", "x" * 512, "\u00e9", "e\u0301"])
def test_keys_and_tags_that_python_takes_are_taken(place: Place, text: str) -> None:
    ((job_id, _),) = submit(place, [{"task": "work", "key": text, "tags": [text[:100]]}])
    job = place.app.sync.get(f"key:{text}")
    assert (job.id, job.carried.tags) == (str(job_id), (text[:100],))


def test_submission_by_trigger_follows_the_transaction(place: Place) -> None:
    place.execute("""
        create function SCHEMA.made() returns trigger language plpgsql as $$
        begin
            perform SCHEMA.submit(json_build_array(json_build_object(
                'task', 'work', 'payload', json_build_object('n', new.n), 'key', 'row ' || new.n)));
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
    assert place.app.sync.get("key:row 1").payload == '{"n" : 1}'


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


def test_the_older_server_does_the_same() -> None:
    server = shared(FLOOR)
    with server.fresh_schema() as schema:
        app = Holdfast(server.url(schema=schema))
        app.sync.count()
        jobs = '[{"task":"work","payload":{"n":"\\u0000"},"tags":["a"],"retry":[1,5],"timeout":"1m"}]'
        submitting = "select * from SCHEMA.submit(%s)".replace("SCHEMA", schema)
        ((job_id, created),) = server.execute(submitting, jobs, database="app")
        job = app.sync.get(str(job_id))
        assert (created, job.state, job.payload) == (True, JobState.QUEUED, '{"n":"\\u0000"}')
        assert job.carried.timeout == 60
        app.sync.close()
