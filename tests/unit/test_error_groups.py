"""Groups of errors: the same cause has one id, whatever numbers and names its messages contain."""

from __future__ import annotations

import hashlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.error_groups import FailedJob, check_error_group, find_place, group_failed_jobs, identify_group
from holdfast.core.errors import Invalid
from holdfast.worker.executors.outcome import format_traceback

FRAMES = """Traceback (most recent call last):
  File "/srv/shop/mail.py", line 12, in send
    client.post(order)
  File "/srv/venv/lib/python3.12/site-packages/httpx/_client.py", line 914, in post
    raise ConnectError(message)
httpx.ConnectError: refused
"""
HOUR_US = 3_600_000_000


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ValueError: order 17 is void", "ValueError: order 18 is void"),
        ("no account 0193e4a0-1c2f-7a35-9d3b-5f0a4c1e2b77", "no account 01a2197c-f96b-7000-b546-bf48c649dc38"),
        ("smtp-2.example.com refused ann@example.com", "smtp-17.example.com refused bob@example.org"),
        ("<Order object at 0x7f3a2c>", "<Order object at 0x7fb911>"),
        ("ValidationError: 1 error\nname\n  missing", "ValidationError: 2 error\ncity\n  missing"),
        (
            "lease expired: worker web-1-77-ab died during attempt 1",
            "lease expired: worker db-9-3-f died during attempt 2",
        ),
    ],
)
def test_numbers_ids_and_addresses_do_not_separate_errors(one: str, other: str) -> None:
    assert identify_group(one, FRAMES) == identify_group(other, FRAMES.replace("line 12", "line 99"))


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        ("KeyError: 'email'", FRAMES),
        ("ValueError: order is void", FRAMES),
        ("ValueError: refused", FRAMES.replace("in send", "in receive")),
        ("ValueError: refused", FRAMES.replace("mail.py", "post.py")),
        ("ValueError: refused", None),
    ],
)
def test_other_text_or_place_is_another_error(error: str, traceback: str | None) -> None:
    assert identify_group(error, traceback) != identify_group("ValueError: refused", FRAMES)


@given(st.text(st.sampled_from("ab1é٣_.+-@ :"), max_size=40))
def test_signs_stand_for_addresses_and_words_with_digits(error: str) -> None:
    line = re.sub(r"[\w.+-]+@[\w.-]+|[\w.-]*\d[\w.-]*", "#", error.lstrip())
    assert identify_group(error, None) == hashlib.blake2b(f"{line}\n".encode(), digest_size=6).hexdigest()


@pytest.mark.parametrize("error", ["x" * 4096, "-" * 4096, f"{'x' * 399}@"])
def test_long_word_is_read_in_linear_time(error: str) -> None:
    began = time.thread_time()
    for _ in range(200):
        identify_group(error, None)
    assert time.thread_time() - began < 0.2


def test_id_is_twelve_digits_for_any_text() -> None:
    for error in ("", "\n", "x" * 10_000, "1" * 10_000, "\udc80", "<script>"):
        assert check_error_group(identify_group(error, None)) == identify_group(error, None)
    for wrong in ("", "5F0C9A41D2BE", "5f0c9a41d2be0", "' or 1=1", -1, None, [[]]):
        with pytest.raises(Invalid, match="holdfast errors"):
            check_error_group(wrong)


def test_place_is_the_innermost_frame_outside_libraries() -> None:
    assert find_place(FRAMES) == "shop/mail.py in send"
    assert (
        find_place(FRAMES.replace("/srv/shop/mail.py", "/usr/lib/python3.12/site-packages/x.py"))
        == "httpx/_client.py in post"
    )
    assert (
        find_place(FRAMES.replace("/srv/shop", "C:\\srv\\shop").replace("shop/mail", "shop\\mail"))
        == "shop/mail.py in send"
    )
    assert find_place("goroutine 1 [running]") is None
    assert find_place(None) is None


def test_place_of_a_chained_exception_is_that_of_the_last() -> None:
    def inner() -> None:
        raise KeyError("a")

    def outer() -> None:
        try:
            inner()
        except KeyError as error:
            raise ValueError("b") from error

    with pytest.raises(ValueError, match="b") as caught:
        outer()
    assert find_place(format_traceback(caught.value)) == "unit/test_error_groups.py in outer"


def test_groups_are_summed_up_with_the_latest_first() -> None:
    jobs = [
        FailedJob("1", "mail", "send", "a" * 12, True, 5 * HOUR_US + 1),
        FailedJob("2", "post", "send", "a" * 12, False, 7 * HOUR_US + 2),
        FailedJob("3", "mail", "send", "a" * 12, True, 5 * HOUR_US + 3),
        FailedJob("4", "mail", "charge", "b" * 12, True, 9 * HOUR_US),
    ]
    second, first = group_failed_jobs(jobs)
    assert (second.id, second.dead, second.retrying, second.latest) == ("b" * 12, 1, 0, "4")
    assert (first.dead, first.retrying, first.first_us, first.last_us, first.latest) == (
        2,
        1,
        5 * HOUR_US + 1,
        7 * HOUR_US + 2,
        "2",
    )
    assert (first.tasks, first.queues) == (("send",), ("mail", "post"))
    assert first.hours == ((5 * HOUR_US, 2), (7 * HOUR_US, 1))
