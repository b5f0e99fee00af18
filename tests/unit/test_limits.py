"""Limits: the arithmetic of buckets and partitions, and how limits are parsed, declared and changed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import Invalid
from holdfast.app.limits import scope_buckets
from holdfast.core.limit_options import (
    LimitOptions,
    draft_limit,
    format_rate,
    format_values,
    limit_options,
    parse_values,
)
from holdfast.core.limits import (
    KEEPS_START_TAG,
    MAX_KEPT_START_TAGS,
    MAX_WEIGHT,
    SEPARATOR,
    Admission,
    BucketState,
    Limit,
    LimitTable,
    LimitValues,
    bucket_use,
    compute_token_times,
    decode_limits,
    encode_limit,
    name_bucket,
    parse_value,
    read_weights,
    split_bucket,
    split_partition,
    use_of_running,
)
from holdfast.core.models import Job, NewJob

SECOND = 1_000_000
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


def limit_of(name: str = "crm", **fields: Any) -> Limit:
    own = {field: fields.pop(field) for field in ("queue", "task", "by", "owner", "declared") if field in fields}
    return Limit(name=name, values=LimitValues(**fields), **(own or {"queue": "default"}))


def admission(*limits: Limit, used: dict[str, int] | None = None, now_us: int = 0, **states: BucketState) -> Admission:
    return Admission({each.name: each for each in limits}, used or {}, dict(states), now_us)


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@given(
    rate=st.integers(1, 1000),
    period_us=st.sampled_from([SECOND, 60 * SECOND, 7 * SECOND, 3600 * SECOND]),
    burst=st.integers(1, 50),
    steps=st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 60)), min_size=1, max_size=80),
)
@example(rate=3, period_us=SECOND, burst=1, steps=[(333_333, 1)] * 12)
def test_tokens_never_exceed_burst_and_rate_in_any_window(
    rate: int, period_us: int, burst: int, steps: list[tuple[int, int]]
) -> None:
    values = LimitValues(rate=rate, period_us=period_us, burst=burst)
    taken: list[tuple[int, int]] = []
    now = full_at = 0
    for pause, tokens in steps:
        now += pause
        after, first = compute_token_times(values, full_at, tokens, now)
        if first <= now:
            full_at = after
            taken.append((now, min(tokens, burst)))
    for begin in range(len(taken)):
        number = 0
        for at, tokens in taken[begin:]:
            number += tokens
            assert number <= burst + (at - taken[begin][0]) * rate / period_us + 1e-9


@given(rate=st.integers(1, 1000), burst=st.integers(1, 50), tokens=st.integers(1, 100), full_at=st.integers(0, SECOND))
def test_tokens_can_be_taken_at_the_promised_instant(rate: int, burst: int, tokens: int, full_at: int) -> None:
    values = LimitValues(rate=rate, burst=burst)
    _, first = compute_token_times(values, full_at, tokens, 0)
    if first > 0:
        assert compute_token_times(values, full_at, tokens, first)[1] <= first
        assert compute_token_times(values, full_at, tokens, first - 1)[1] > first - 1


def test_bucket_is_free_after_tokens_and_pause() -> None:
    def free_at(limit: Limit | None, state: BucketState, now_us: int) -> tuple[int, bool]:
        use = bucket_use("mail", limit, 0, state, now_us)
        return use.free_at_us, use.paused

    limit = limit_of(rate=1)
    assert free_at(limit, BucketState(), 5) == (0, False)
    assert free_at(limit, BucketState(full_at_us=10 * SECOND), 0) == (10 * SECOND, False)
    assert free_at(limit, BucketState(full_at_us=10 * SECOND, paused_until_us=20 * SECOND), 0) == (20 * SECOND, True)
    assert free_at(limit, BucketState(full_at_us=20 * SECOND, paused_until_us=10 * SECOND), 0) == (20 * SECOND, False)
    assert free_at(limit, BucketState(full_at_us=10 * SECOND), 10 * SECOND) == (0, False)
    assert free_at(None, BucketState(full_at_us=10 * SECOND, paused_until_us=3), 0) == (3, True)


# ── admission ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_admission_takes_from_every_bucket_or_from_none() -> None:
    states = {"rate": BucketState(full_at_us=5 * SECOND)}
    decide = admission(limit_of("many", concurrency=2), limit_of("rate", rate=1), **states)
    partition = SEPARATOR.join(["many", "rate"])
    assert decide.admit(partition) == 5 * SECOND
    assert decide.changed == set()
    assert [decide.admit("many"), decide.admit("many"), decide.admit("many")] == [None, None, KEEPS_START_TAG]


def test_weight_above_the_concurrency_needs_the_whole_limit() -> None:
    limit = limit_of(concurrency=3)
    assert admission(limit, used={"crm": 1}).admit("crm", "[100]") == KEEPS_START_TAG
    decide = admission(limit)
    assert decide.admit("crm", "[100]") is None
    assert decide.admit("crm") == KEEPS_START_TAG


def test_partition_of_a_removed_limit_is_admitted() -> None:
    decide = admission()
    assert decide.admit("gone=1") is None
    assert admission(gone=BucketState(paused_until_us=7)).admit("gone") == 7


def test_heavy_job_reserves_room_from_lighter_ones() -> None:
    decide = admission(limit_of("all", concurrency=4), limit_of("other", concurrency=4), used={"all": 1})
    assert decide.admit("all", "[4]") == KEEPS_START_TAG
    assert [decide.admit("all"), decide.admit("all", "[2]"), decide.admit("other")] == [
        KEEPS_START_TAG,
        KEEPS_START_TAG,
        None,
    ]


def test_job_of_a_full_bucket_reserves_nothing() -> None:
    limits = limit_of("all", concurrency=4), limit_of("own", queue="q", by="args.t", concurrency=1)
    decide = admission(*limits, used={"all": 1, "own=a": 1})
    assert decide.admit(SEPARATOR.join(["all", "own=a"]), "[4, 1]") == KEEPS_START_TAG
    assert decide.admit(SEPARATOR.join(["all", "own=b"]), None) is None


def test_heavy_job_reserves_in_its_keys_first() -> None:
    limits = limit_of("all", concurrency=4), limit_of("own", queue="q", by="args.t", concurrency=4)
    decide = admission(*limits, used={"all": 2, "own=a": 2})
    assert decide.admit(SEPARATOR.join(["all", "own=a"]), "[4, 4]") == KEEPS_START_TAG
    assert decide.admit(SEPARATOR.join(["all", "own=a"]), None) == KEEPS_START_TAG
    assert decide.admit(SEPARATOR.join(["all", "own=b"]), None) is None


def test_heavy_job_without_tokens_keeps_its_turn() -> None:
    states = {"all": BucketState(full_at_us=2 * SECOND)}
    decide = admission(limit_of("all", rate=1, burst=4), limit_of("k", concurrency=9), **states)
    both = SEPARATOR.join(["all", "k"])
    assert (decide.admit(both, "[4, 1]"), decide.due_us) == (KEEPS_START_TAG, 2 * SECOND)
    assert decide.admit(both) == 3 * SECOND  # once the heavy one has taken its tokens
    assert decide.changed == set()


def test_few_heavy_jobs_without_tokens_of_a_key_keep_their_start_tags() -> None:
    limits = limit_of("own", by="args.t", rate=1, burst=4), limit_of("k", concurrency=9)
    names = [f"own={number}" for number in range(MAX_KEPT_START_TAGS + 5)]
    decide = admission(*limits, **dict.fromkeys(names, BucketState(full_at_us=2 * SECOND)))
    answers = [decide.admit(SEPARATOR.join(["k", name]), "[1, 4]") for name in names]
    assert answers == [KEEPS_START_TAG] * MAX_KEPT_START_TAGS + [2 * SECOND] * 5


@given(weights=st.lists(st.integers(1, 6), max_size=40), concurrency=st.integers(1, 9))
def test_admitted_weight_never_exceeds_the_concurrency(weights: list[int], concurrency: int) -> None:
    decide = admission(limit_of(concurrency=concurrency))
    admitted = sum(min(weight, concurrency) for weight in weights if decide.admit("crm", f"[{weight}]") is None)
    assert admitted <= concurrency


@pytest.mark.parametrize("text", [None, "", "[]", "[1]", "[1,0]", "[1,-5]", '[1,"2"]', "{}", "spoiled", "[1,2,3]"])
def test_spoiled_weights_count_as_one(text: str | None) -> None:
    assert read_weights(text, 2) == [1, 1]


def test_use_counts_rows_by_their_weights() -> None:
    partition = SEPARATOR.join(["a", "b=1"])
    rows = [(partition, "[2,3]", 4), (partition, None, 1), ("a", None, 5)]
    assert use_of_running(rows) == {"a": 14, "b=1": 13}


# ── partitions ──────────────────────────────────────────────────────────────────────────────────────────────────────
@given(value=JSON)
@example(value="\ud800")
@example(value="é" * 1000)
@example(value="a=b")
@example(value=f"a{SEPARATOR}crm")
@example(value="\x00\n\x1b[31m")
@example(value={"z": [1.5, None], "a": "\u2028"})
@example(value=10**400)
@example(value=float("nan"))
def test_bucket_of_any_value_is_short_printable_and_names_its_limit(value: Any) -> None:
    bucket = name_bucket(limit_of(by="args.tenant"), value)
    assert bucket == name_bucket(limit_of(by="args.tenant"), value)
    assert len(bucket) <= len("crm=") + 64
    assert bucket.isprintable()
    assert split_partition(SEPARATOR.join([bucket, "other"])) == [bucket, "other"]
    name, text = split_bucket(bucket)
    assert name == "crm"
    assert text is not None
    bucket.encode()


def test_long_and_unprintable_values_have_buckets_of_their_own() -> None:
    limit = limit_of(by="args.tenant")
    values = [
        "x" * 65,
        "x" * 66,
        "\x00",
        "\x01",
        "\ud800",
        "\ud801",
        "",
        " ",
        "é",
        "e\u0301",
        [1],
        [[1]],
        {"a": 1},
        1.5,
    ]
    assert len({name_bucket(limit, value) for value in values}) == len(values)


def test_missing_value_has_a_bucket_of_its_own() -> None:
    limit = limit_of(by="args.tenant")
    values = [None, "null", '"null"', r'"\"null\""', "acme", '"acme"', "", '"']
    buckets = [name_bucket(limit, value) for value in values]
    assert len(set(buckets)) == len(values)
    assert [name_bucket(limit, parse_value(split_bucket(each)[1])) for each in buckets] == buckets
    assert name_bucket(limit, 1) == name_bucket(limit, "1")


def test_spelling_of_an_object_does_not_matter() -> None:
    limit = limit_of(by="args.tenant")
    assert name_bucket(limit, {"a": 1, "b": 2}) == name_bucket(limit, {"b": 2, "a": 1})


def test_partition_has_every_limit_of_queue_and_task() -> None:
    table = LimitTable(
        [limit_of("q", queue="mail", concurrency=1), limit_of("t", task="send", by="args.to", weight="args.size")]
    )
    payload = '{"to":"a","size":3}'
    assert table.find_partition("send", "mail", payload) == (SEPARATOR.join(["q", "t=a"]), "[1, 3]")
    assert table.find_partition("send", "other", payload) == ("t=a", "[3]")
    assert table.find_partition("other", "mail", payload) == ("q", None)
    assert table.find_partition("other", "other", payload) == (None, None)
    assert table.queues == {"mail"}


def test_plain_jobs_are_bound_to_no_partition() -> None:
    jobs = [NewJob(id="", task="send", payload="{}", queue="mail")]
    assert LimitTable().bind(jobs) is jobs
    assert LimitTable([limit_of("q", queue="other", concurrency=1)]).bind(jobs) == jobs
    (bound,) = LimitTable([limit_of("q", queue="mail", concurrency=1)]).bind(jobs)
    assert bound.partition == "q"


@pytest.mark.parametrize(
    ("payload", "bucket", "weights"),
    [
        ("{}", "crm=null", None),
        ('{"tenant":null}', "crm=null", None),
        ('{"tenant":"null"}', 'crm="null"', None),
        ('{"tenant":"1"}', "crm=1", None),
        ('{"tenant":1}', "crm=1", None),
        ('{"tenant":true,"pages":true}', "crm=true", None),
        ('{"tenant":1.0,"pages":2.0}', "crm=1.0", None),
        ('{"tenant":"a","pages":0}', "crm=a", None),
        ('{"tenant":"a","pages":-3}', "crm=a", None),
        ('{"tenant":"a","pages":"7"}', "crm=a", None),
        ('{"tenant":"a","pages":7}', "crm=a", "[7]"),
        ('{"tenant":"a","pages":99999999}', "crm=a", f"[{MAX_WEIGHT}]"),
    ],
)
def test_odd_payloads_have_a_defined_partition(payload: str, bucket: str, weights: str | None) -> None:
    table = LimitTable([limit_of(queue="default", by="args.tenant", weight="args.pages")])
    assert table.find_partition("work", "default", payload) == (bucket, weights)


def test_use_by_jobs_follows_weights_of_the_limits() -> None:
    table = LimitTable([limit_of(queue="default", by="args.tenant", weight="args.pages")])

    def job(payload: str, partition: str | None) -> Job:
        return Job("", "work", "default", payload, 0, 0, None, 0, 0, 0, 0, partition=partition)

    jobs = [job('{"tenant":"a","pages":5}', "crm=a"), job('{"tenant":"a"}', "crm=a"), job("{}", None)]
    assert table.use_by_jobs(jobs) == {"crm=a": 6}
    assert table.use_by_jobs([job('{"tenant":"b","pages":5}', "crm=a")]) == {"crm=a": 1}  # not reassigned yet


def test_share_is_that_of_the_first_bucket_with_one() -> None:
    table = LimitTable([limit_of("crm", by="args.t", shares={"a": 3}), limit_of("q", queue="q", concurrency=1)])
    assert table.share_of(SEPARATOR.join(["q", "crm=a"])) == 3
    assert table.share_of("crm=b") == 1
    assert table.share_of("gone=a") == 1


def test_document_of_a_limit_is_read_back() -> None:
    limit = limit_of(by="args.t", rate=10, burst=3, shares={"é": 2}, declared=LimitValues(concurrency=1), owner="code")
    assert decode_limits([(encode_limit(limit), 7)]) == [Limit(**{**_fields(limit), "revision": 7})]


def _fields(limit: Limit) -> dict[str, Any]:
    return {field: getattr(limit, field) for field in limit.__struct_fields__}


# ── parsing of limits ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("rate", ["1/s", "10/s", "90/m", "100/15m", "500/h", "1/d", "3/7d", "100000/s"])
def test_rate_is_shown_as_it_was_read(rate: str) -> None:
    assert format_rate(parse_values({"rate": rate})) == rate


@pytest.mark.parametrize(
    ("rate", "provided"), [("10/1s", "10/s"), ("60/60s", "60/m"), ("10/24h", "10/d"), ("1/90s", "1/90s")]
)
def test_rate_is_shown_in_its_largest_unit(rate: str, provided: str) -> None:
    assert format_rate(parse_values({"rate": rate})) == provided


@pytest.mark.parametrize(("rate", "burst"), [("1/s", 1), ("10/s", 1), ("90/m", 1), ("25/s", 2), ("1000/s", 100)])
def test_burst_is_by_default_a_tenth_of_a_second(rate: str, burst: int) -> None:
    assert parse_values({"rate": rate}).burst == burst
    assert parse_values({"rate": rate, "weight": 7}).burst == max(7, burst)  # else each job takes the whole bucket


def test_rate_of_weights_in_payloads_needs_a_burst() -> None:
    with pytest.raises(Invalid, match=r"weight: 'args.n' is not valid; give burst too"):
        parse_values({"rate": "10/s", "weight": "args.n"})
    assert parse_values({"rate": "10/s", "weight": "args.n", "burst": 5}).burst == 5
    with pytest.raises(Invalid, match=r"burst: 4 is not valid"):
        parse_values({"rate": "10/s", "weight": 5, "burst": 4})
    assert parse_values({"concurrency": 3, "weight": "args.n"}).burst == 1


@given(
    concurrency=st.none() | st.integers(1, 1_000_000),
    rate=st.none()
    | st.from_regex(r"[1-9][0-9]{0,3}/[1-9]?[0-9]?[smhd]", fullmatch=True).filter(lambda t: "/0" not in t),
    depth=st.none() | st.integers(1, 1_000_000),
    weight=st.integers(1, 10_000) | st.just("args.pages"),
    shares=st.dictionaries(st.text(), st.integers(1, 1000), max_size=5),
)
def test_values_are_read_back_as_they_are_shown(**provided: Any) -> None:
    values = parse_values(provided | ({} if provided["rate"] is None else {"burst": 10_000}))
    assert parse_values(format_values(values)) == values


BAD: list[tuple[str, dict[str, Any]]] = [
    ("concurrency", {"concurrency": 0}),
    ("concurrency", {"concurrency": -5}),
    ("concurrency", {"concurrency": 1_000_001}),
    ("concurrency", {"concurrency": 1.5}),
    ("concurrency", {"concurrency": True}),
    ("concurrency", {"concurrency": "5"}),
    ("concurrency", {}),
    ("rate", {"rate": "-1/s"}),
    ("rate", {"rate": "0/s"}),
    ("rate", {"rate": "1.5/s"}),
    ("rate", {"rate": "10"}),
    ("rate", {"rate": "10/0s"}),
    ("rate", {"rate": "10/week"}),
    ("rate", {"rate": 10}),
    ("rate", {"rate": "100001/s"}),
    ("rate", {"rate": "１/s"}),
    ("burst", {"burst": 5}),
    ("burst", {"rate": "1/s", "burst": 0}),
    ("depth", {"depth": 0}),
    ("depth", {"depth": 5, "queue": None, "rate": "1/s"}),
    ("by", {"depth": 5, "by": "tenant"}),
    ("depth", {"depth": 1_000_001, "by": "args.t"}),
    ("depth", {"depth": 0, "by": "args.t"}),
    ("depth", {"depth": "5", "queue": None, "task": "send"}),
    ("weight", {"concurrency": 1, "weight": 0}),
    ("weight", {"concurrency": 1, "weight": MAX_WEIGHT + 1}),
    ("weight", {"concurrency": 1, "weight": "pages"}),
    ("weight", {"concurrency": 1, "weight": "args"}),
    ("weight", {"concurrency": 1, "weight": "args..pages"}),
    ("by", {"concurrency": 1, "by": "tenant"}),
    ("by", {"concurrency": 1, "by": "args.a.b.c.d.e.f.g.h.i"}),
    ("by", {"concurrency": 1, "by": f"args.{'x' * 65}"}),
    ("by", {"concurrency": 1, "by": "args.\x1f"}),
    ("shares", {"concurrency": 1, "shares": {"a": 2}}),
    ("shares", {"by": "args.t", "shares": {"a": 0}}),
    ("shares", {"by": "args.t", "shares": {"a": 1001}}),
    ("shares", {"by": "args.t", "shares": ["a"]}),
    ("shares", {"by": "args.t", "shares": {str(n): 1 for n in range(1001)}}),
    ("queue", {"concurrency": 1, "queue": "No Queue"}),
    ("task", {"concurrency": 1, "task": "send"}),
    ("task", {"concurrency": 1, "queue": None, "task": "no task"}),
    ("queue", {"queue": None, "concurrency": 1}),
    ("queue", {"queue": None, "by": "args.t", "rate": "1/s"}),
    ("queue", {"queue": None}),
]


@pytest.mark.parametrize(("field", "options"), BAD)
def test_bad_limit_is_refused_with_field_and_remedy(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        draft_limit("mail", LimitOptions(**{"queue": "mail", **options}))
    assert caught.value.field == field
    assert caught.value.remedy


def test_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(Invalid, match="did you mean concurrency"):
        limit_options({"concurency": 5})
    with pytest.raises(Invalid, match="limit"):
        draft_limit("No Name", LimitOptions(queue="mail", concurrency=1))


def test_scope_names_the_buckets_to_pause() -> None:
    table = LimitTable(
        [
            limit_of("q", queue="mail", concurrency=1),
            limit_of("t", task="send", concurrency=1),
            limit_of("k", task="send", by="args.to"),
        ]
    )
    partition, _ = table.find_partition("send", "mail", '{"to":"a"}')
    found = {scope: scope_buckets(table, scope, partition) for scope in ("key", "queue", "task")}
    assert found == {"key": ["k=a"], "queue": ["q"], "task": ["t"]}
    assert scope_buckets(table, "key", None) == []
