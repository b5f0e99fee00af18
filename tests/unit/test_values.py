"""What single values may be: the tables of bad input, and that good input comes back as it should."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import Holdfast
from holdfast.core import validation
from holdfast.core.errors import Invalid, TooLarge

URL_FORMS = ["postgresql://{}:{}@h/d", "{}:{}@h", "redis://h/{}?password={}", "postgresql://h:1/{}?password={}"]
PIN = "p@s:s/w?o#r%d"


def nested(depth):
    inner = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


ENDLESS: dict[str, object] = {}
ENDLESS["self"] = ENDLESS

HIDDEN = [
    "a\nb",
    "a\r\nb",
    "\x1b[2J",
    "a\u202eb",
    "a\u200db",
    "a\u200bb",
    "\ufeffa",
    "a\x00",
    "a\x7f",
    "a\u2028b",
    "\ud800",
]


@pytest.mark.parametrize("name", ["a", "0", "default", "mail.high_1-2", "a" * 64])
def test_names_of_queues(name):
    assert validation.check_name("queue", name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "\t", "a\n", "A", "a" * 65, ".a", "-a", "_a", None, 5, b"a"),
        *("../../etc/passwd", "%2e%2e%2f", "a/b", "{tag}", "*", "?", "a:b", "é", "e\u0301", "İ", "ａ", "a b"),
    ],
)
def test_names_that_need_escaping_or_look_alike_are_refused(name):
    with pytest.raises(Invalid, match="queue"):
        validation.check_name("queue", name)


@pytest.mark.parametrize("name", ["email.send", "_private", "a:b/c-d", "Mod.func", "x" * 128])
def test_names_of_tasks(name):
    assert validation.check_task_name(name) == name


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a\n", "../x", "/x", "x" * 129, "é", "ａ", "a\x00", "{x}", None, *HIDDEN]
)
def test_bad_names_of_tasks(name):
    with pytest.raises(Invalid, match="task"):
        validation.check_task_name(name)


@pytest.mark.parametrize("key", ["k", "welcome-42", "a b", "é", "e\u0301", "😀", "k" * 512])
def test_keys_are_kept_as_they_are(key):
    assert validation.check_key(key) == key


@pytest.mark.parametrize("key", ["", " ", "\t", "\u3000", None, 5, "\u0301", "\u0301a", *HIDDEN])
def test_bad_keys(key):
    with pytest.raises(Invalid, match="key"):
        validation.check_key(key)


def test_a_key_has_a_limit_that_may_be_lowered():
    with pytest.raises(TooLarge):
        validation.check_key("k" * 513)
    with pytest.raises(TooLarge):
        validation.check_key("k" * 11, limit=10)


@pytest.mark.parametrize("tags", ["mail", [""], ["x" * 10_240], ["a\n"], [5], [str(number) for number in range(1001)]])
def test_bad_tags(tags):
    with pytest.raises(Invalid, match="tags"):
        validation.check_tags(tags)


def test_tags_are_kept_once_each_in_their_order():
    assert validation.check_tags(["b", "a", "b"]) == ("b", "a")
    assert validation.check_tag("x" * 100) == "x" * 100


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_priorities(priority):
    assert validation.check_priority(priority) == priority


@pytest.mark.parametrize("priority", [-101, 101, 2**31, -(2**31), 1.0, 0.5, True, "5", None])
def test_bad_priorities(priority):
    with pytest.raises(Invalid, match="priority"):
        validation.check_priority(priority)


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2030-01-31T08:00:00Z", datetime(2030, 1, 31, 8, tzinfo=UTC)),
        ("2030-01-31t08:00:00z", datetime(2030, 1, 31, 8, tzinfo=UTC)),
        ("2030-01-31 08:00:00+01:00", datetime(2030, 1, 31, 7, tzinfo=UTC)),
        ("2030-01-31T08:00:00.123456789-05:30", datetime(2030, 1, 31, 13, 30, 0, 123456, tzinfo=UTC)),
        ("2000-01-01T00:00:00Z", validation.FIRST_INSTANT),
        ("2199-12-31T23:59:59.999999Z", validation.LAST_INSTANT),
        ("1999-12-31T23:00:00-01:00", validation.FIRST_INSTANT),
        (datetime(2030, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), datetime(2030, 1, 1, tzinfo=UTC)),
    ],
)
def test_instants(text, instant):
    assert validation.parse_instant(text) == instant
    assert validation.parse_instant(text).tzinfo is UTC


@pytest.mark.parametrize(
    "value",
    [
        *("9999-12-31T23:59:59-23:00", "10000-01-01T00:00:00Z", "294277-01-01T00:00:00Z", "0001-01-01T00:00:00+23:00"),
        *("1969-01-01T00:00:00Z", "1999-12-31T23:59:59Z", "2200-01-01T00:00:00Z", "2199-12-31T23:59:59-01:00"),
        *("infinity", "now", "", " ", 1893456000000, 1.5, True, None, b"2030-01-31T08:00:00Z"),
        *(
            "2030-01-31T08:00:00",
            "2030-01-31",
            "2030-01-31T08:00Z",
            "2030-01-31T08:00:00+25:00",
            "2030-01-31T08:00:60Z",
        ),
        *(
            "2024-02-30T00:00:00Z",
            "2030-W05-4T08:00:00Z",
            "20300131T080000Z",
            "2030-01-31T24:00:00Z",
            "2030-01-31T08:00:00+05:75",
        ),
        *("２030-01-31T08:00:00Z", "2030-01-31T08:00:00Z\n", "2030-01-31T08:00:00+0100"),
        *(datetime(2030, 1, 1), datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)),  # noqa: DTZ001
    ],
)
def test_bad_instants(value):
    with pytest.raises(Invalid, match="run_at"):
        validation.parse_instant(value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *(
            (30, 30),
            (1.5, 1.5),
            (0, 0),
            (1e-9, 0),
            ("30", 30),
            ("30s", 30),
            ("1.5h", 5400),
            ("500ms", 0.5),
            ("5m", 300),
        ),
        *(("2h", 7200), ("7d", 604800), (" 7 d ", 604800), (timedelta(days=1), 86400)),
    ],
)
def test_durations(value, seconds):
    assert validation.parse_duration(value) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "value",
    [
        *(
            -1,
            1e18,
            10**400,
            float("nan"),
            float("inf"),
            True,
            None,
            [],
            "",
            "s",
            "-1s",
            "5x",
            "5 m s",
            "1e3",
            "nan",
            "1_0",
        ),
        *("٣s", "5M", "999999999999d", "9" * 5000, "200000000000h", timedelta(seconds=-1), timedelta.max),
    ],
)
def test_bad_durations(value):
    with pytest.raises(Invalid, match="delay"):
        validation.parse_duration(value, "delay")


@given(st.timedeltas(timedelta(0), timedelta(days=365)))
def test_a_shown_duration_reads_back(span):
    assert validation.parse_duration(validation.format_duration(span)) == span


@pytest.mark.parametrize(
    ("span", "text"), [(0, "0s"), (0.0015, "0.0015s"), (0.5, "500ms"), (90, "90s"), (3600, "1h"), (604800, "7d")]
)
def test_a_duration_is_shown_in_the_largest_exact_unit(span, text):
    assert validation.format_duration(timedelta(seconds=span)) == text


@pytest.mark.parametrize(
    ("value", "size"), [(5, 5), ("5", 5), ("64KiB", 65536), ("1 mib", 1048576), ("2GiB", 2**31), ("0B", 0)]
)
def test_sizes(value, size):
    assert validation.parse_size(value) == size


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "", "64KB", "64K", "-1", "1.5MiB", "9" * 5000])
def test_bad_sizes(value):
    with pytest.raises(Invalid, match="size"):
        validation.parse_size(value)


@given(st.integers(0, 2**50))
def test_a_shown_size_reads_back(size):
    assert validation.parse_size(validation.format_size(size)) == size


@pytest.mark.parametrize("value", [1, 0, "yes", "1", "", None])
def test_only_true_and_false_are_booleans(value):
    assert (validation.parse_boolean("TRUE"), validation.parse_boolean(False)) == (True, False)
    with pytest.raises(Invalid, match="true or false"):
        validation.parse_boolean(value)


@pytest.mark.parametrize(
    "timeout", [0, -1, 1e-9, timedelta(days=30, microseconds=1), 1e18, float("nan"), "5", True, None]
)
def test_bad_timeouts(timeout):
    with pytest.raises(Invalid, match="timeout"):
        validation.check_timeout(timeout)


@pytest.mark.parametrize("timeout", [-1, 0, "-1s", 1e18, timedelta(days=31)])
def test_timeout_out_of_bounds_names_its_bounds(timeout):
    with pytest.raises(Invalid, match=r"timeout: .* give more than 0 seconds and at most 30 days"):
        validation.check_timeout(timeout)


@pytest.mark.parametrize("span", ["-1", "-1s", -1, timedelta(seconds=-1)])
def test_negative_duration_names_its_bounds(span):
    with pytest.raises(Invalid, match="give between 0 seconds and 175 years"):
        validation.parse_duration(span)


def test_bad_timeout_of_a_task_names_the_task():
    with pytest.raises(Invalid, match=r"timeout of task 'z': -1 is not valid; give more than 0 seconds"):
        Holdfast("sqlite:///unused.db").task("z", timeout=-1)


def test_a_bad_timeout_is_shown_as_a_span_is_written():
    with pytest.raises(Invalid, match="timeout: '0s' is not valid"):
        validation.check_timeout(timedelta(0))


def test_timeouts():
    assert validation.check_timeout(0.5) == timedelta(seconds=0.5)
    assert validation.check_timeout(timedelta(days=30)) == timedelta(days=30)


@pytest.mark.parametrize(
    "metadata",
    [
        *(None, [], "x", {1: 2}, {"a": (1,)}, {"a": {1, 2}}, {"a": float("nan")}, {"a": float("inf")}, {"a": "\ud800"}),
        *({"a": datetime.now(UTC)}, ENDLESS, nested(100_000), nested(64), {"a": "x" * 16_384}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bad_metadata(metadata):
    with pytest.raises(Invalid, match="metadata"):
        validation.check_metadata(metadata)


def test_metadata_is_copied_and_measured_in_bytes():
    given_metadata = {"a": ["é", 1, 1.5, None, True]}
    kept = validation.check_metadata(given_metadata)
    given_metadata["a"].clear()
    assert kept == {"a": ["é", 1, 1.5, None, True]}
    exact = {"a": "x" * (validation.MAX_METADATA_BYTES - 8)}
    assert validation.check_metadata(exact) == exact
    assert validation.check_metadata(nested(63)) == nested(63)
    with pytest.raises(TooLarge):
        validation.check_metadata({"a": "é" * (validation.MAX_METADATA_BYTES // 2)})


@pytest.mark.parametrize(
    ("value", "queues"),
    [
        ("*", {"*": None}),
        ("mail:10,default:5", {"mail": 10, "default": 5}),
        (" mail : 10 , default ", {"mail": 10, "default": None}),
        ({"mail": 10, "other": None}, {"mail": 10, "other": None}),
    ],
)
def test_queues(value, queues):
    assert validation.parse_queues(value) == queues
    assert validation.parse_queues(validation.format_queues(queues)) == queues


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        ",",
        "mail,",
        "mail:",
        "mail:0",
        "mail:x",
        "mail:-1",
        "Mail",
        "mail,mail:3",
        {},
        {"mail": True},
        {"M": 1},
        5,
        None,
    ],
)
def test_bad_queues(value):
    with pytest.raises(Invalid, match="queues"):
        validation.parse_queues(value)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("sqlite:///holdfast.db", "sqlite:///holdfast.db"),
        ("sqlite:////srv/a:b@c/x.db", "sqlite:////srv/a:b@c/x.db"),
        ("postgresql://h:5432/db", "postgresql://h:5432/db"),
        ("postgresql://u@h1:1,h2:2/db", "postgresql://u@h1:1,h2:2/db"),
        (f"postgresql://u:{PIN}@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:pässwörd@h:1/db?x=1", "postgresql://u:***@h:1/db?x=1"),
        ("redis://:hush@h/0", "redis://:***@h/0"),
        ("postgresql://h/db?password=hush&x=1", "postgresql://h/db?password=***&x=1"),
        ("postgresql://u:one@h/db?sslpassword=two", "postgresql://u:***@h/db?sslpassword=***"),
        ("u:hush@h/db", "u:***@h/db"),
        ("host=h password=hush", "host=h password=***"),
    ],
)
def test_a_password_is_hidden(url, masked):
    assert validation.mask_url(url) == masked


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1), st.sampled_from(URL_FORMS))
@example("://", "{}:{}@h")
@example("x@y", "postgresql://h:1/{}?password={}")
def test_no_password_shows_whatever_is_in_it(noise, form):
    password = f".{noise}hush"  # a leading dot: "user://…" without a scheme would be a scheme
    if "password=" in form:
        password = password.replace("&", "")  # which ends a query's value
    assert "hush" not in validation.mask_url(form.format("user", password))
