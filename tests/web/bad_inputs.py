"""Bad requests: the rows B01 to B59 and B89 to B95 of the table of bad inputs that come over HTTP.

A row's id begins with its number there. What is refused changes nothing, gives a problem document with a stable
code, and is never an error of ours. Unparsable JSON answers 422, as every value that is not as it should be.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.web.client import JSON


class Bad(NamedTuple):
    """A body and what comes of it."""

    id: str
    body: bytes
    status: int
    code: str
    headers: dict[str, str] = JSON


def job(**given: Any) -> bytes:
    return json.dumps({"task": "work", "payload": {}, **given}).encode()


def in_payload(text: str) -> bytes:
    return b'{"task": "work", "payload": {"x": %s}}' % text.encode()


MEBIBYTE = 1024 * 1024
DEEP = "[" * 80 + "]" * 80

BAD = [
    Bad("B01-empty", b"", 422, "body_required"),
    Bad("B02-cut", b"{", 422, "invalid_json"),
    Bad("B02-comma", b'{"a":1,}', 422, "invalid_json"),
    Bad("B02-trailing", job() + b"x", 422, "invalid_json"),
    Bad("B02-no-object", b"[]", 422, "invalid"),
    Bad("B02-null", b"null", 422, "invalid"),
    Bad("B04-text", job(), 415, "unsupported_media_type", {"content-type": "text/plain"}),
    Bad("B04-form", job(), 415, "unsupported_media_type", {"content-type": "multipart/form-data; boundary=x"}),
    Bad("B04-none", job(), 415, "unsupported_media_type", {}),
    Bad("B04-charset", job(), 415, "unsupported_media_type", {"content-type": "application/json; charset=latin-1"}),
    Bad("B05-utf-16", job().decode().encode("utf-16-le"), 422, "invalid_json"),
    Bad("B05-utf-16-with-mark", job().decode().encode("utf-16"), 422, "invalid_unicode"),
    Bad("B05-latin-1", '{"task": "é"}'.encode("latin-1"), 422, "invalid_unicode"),
    Bad("B06-mark", b"\xef\xbb\xbf" + job(), 422, "invalid_unicode"),
    Bad("B08-twice", b'{"task":"work","payload":{},"queue":"a","queue":"b"}', 422, "duplicate_key"),
    Bad("B08-twice-inside", b'{"task":"work","payload":{"a":{"b":1,"b":1}}}', 422, "duplicate_key"),
    Bad("B09-unknown", job(prioritty=1), 422, "unknown_field"),
    *(Bad(f"B10-id-{text!r}", job(id=text), 422, "invalid") for text in ("", " ", "\t", "x", 5)),
    *(Bad(f"B10-task-{text!r}", job(task=text), 422, "invalid") for text in ("", " ", "\t", "a\nb", "x" * 129, 5)),
    *(
        Bad(f"B12-key-{text!r}", job(key=text), 422, "invalid")
        for text in ("", " ", "a\n", "a\r\n", "\x1b[2J", "a\u202eb", "a\u200db", "\u0301")
    ),
    *(
        Bad(f"B13-queue-{text}", job(queue=text), 422, "invalid")
        for text in ("../../etc/passwd", "%2e%2e%2f", "a/b", "{tag}", "*", "?", ":", "a:b")
    ),
    *(Bad(f"B14-queue-{text}", job(queue=text), 422, "invalid") for text in ("é", "e\u0301", "İ", "ａ", "A")),
    Bad("B16-digits", in_payload("9" * 5000), 422, "number_too_long"),
    Bad("B17-high", in_payload("1e999"), 422, "number_out_of_range"),
    Bad("B17-low", in_payload("-1e999"), 422, "number_out_of_range"),
    *(Bad(f"B18-{word}", in_payload(word), 422, "invalid_json") for word in ("NaN", "Infinity", "-Infinity")),
    Bad("B20-long", b" " * (MEBIBYTE + 1), 413, "too_large"),
    *(
        Bad(f"B21-{coding}", job(), 415, "unsupported_encoding", {**JSON, "content-encoding": coding})
        for coding in ("gzip", "br", "zstd", "identity")
    ),
    Bad("B26-options", job(), 415, "unsupported_media_type", {"content-type": 'application/json; a="' + "\\" * 9000}),
    Bad("B34-surrogate", in_payload('"\\ud800"'), 422, "invalid_unicode"),
    Bad("B34-surrogate-in-key", b'{"task":"work","payload":{"\\udc00":1}}', 422, "invalid_unicode"),
    Bad("B34-surrogate-in-tag", b'{"task":"work","payload":{},"tags":["\\ud800"]}', 422, "invalid_unicode"),
    Bad("B35-deep", in_payload(DEEP), 422, "too_deep"),
    Bad("B35-very-deep", in_payload("[" * 200_000), 422, "too_deep"),
    Bad("B36-payload", in_payload('"' + "x" * 256 * 1024 + '"'), 413, "too_large"),
    Bad("B37-long-name", json.dumps({"task": "work", "payload": {"k" * 65536: 1}}).encode(), 422, "invalid"),
    *(
        Bad(f"B48-{value}", job(run_at=value), 422, "invalid")
        for value in ("9999-12-31T23:59:59-01:00", "1969-12-31T23:59:59Z", "infinity", "now", 1_924_992_000_000, True)
    ),
    *(
        Bad(f"B49-{value}", job(run_at=value), 422, "invalid")
        for value in (
            "2030-01-01T00:00:00",
            "2030-01-01T00:00:00+25:00",
            "2030-12-31T23:59:60Z",
            "2024-02-30T00:00:00Z",
        )
    ),
    *(Bad(f"B50-{value!r}", job(delay=value), 422, "invalid") for value in (-1, 1e18, "5", True, [], {})),
    Bad("B50-both", job(delay=1, run_at="2030-01-01T00:00:00Z"), 422, "invalid"),
    *(
        Bad(f"B52-{value}", job(retry=value), 422, "invalid")
        for value in ("", "sometimes", "exponential:base=-1", "exponential:factor=1e309", {"kind": "x"}, [], 5)
    ),
    *(Bad(f"B53-{value!r}", job(timeout=value), 422, "invalid") for value in (0, -1, 31 * 86_400, "5", [])),
    *(Bad(f"B54-{value!r}", job(priority=value), 422, "invalid") for value in (2**31, -(2**31), 1.5, "5", True, [])),
    Bad("B57-key", job(key="k" * 100_000), 422, "invalid"),
    Bad("B58-many", job(tags=[f"t{number}" for number in range(1001)]), 422, "invalid"),
    *(
        Bad(f"B58-{str(value)[:20]}", job(tags=value), 422, "invalid")
        for value in ([""], ["t" * 10_240], "abc", 5, [5])
    ),
    *(
        Bad(f"attempts-{value!r}", job(max_attempts=value), 422, "invalid")
        for value in (0, 26, 100, "x", "5", 2.5, True, [])
    ),
    Bad("type-missing", b'{"payload":{}}', 422, "missing"),
    Bad("payload-missing", b'{"task":"work"}', 422, "missing"),
    *(Bad(f"payload-{value!r}", job(payload=value), 422, "invalid") for value in ([], "x", 5, None, True)),
    *(Bad(f"metadata-{str(value)[:9]}", job(metadata=value), 422, "invalid") for value in ([], "x", 5, None)),
    Bad("metadata-large", job(metadata={"x": "y" * 17_000}), 413, "too_large"),
    Bad("command", job(task="command", payload={"argv": ["true"]}), 422, "invalid"),
]

ELSEWHERE = {
    22: ("test_bad_clients_sqlite.py", "test_many_idle_connections_delay_no_other_client"),
    24: ("test_bad_inputs_sqlite.py", "test_unknown_paths_and_methods_are_refused"),
    28: ("test_jobs.py", "test_a_wrong_query_is_refused_and_named"),
    29: ("test_jobs.py", "test_a_wrong_query_is_refused_and_named"),
    30: ("test_jobs.py", "test_a_wrong_query_is_refused_and_named"),
    32: ("test_submitting.py", "test_a_payload_comes_back_as_it_went_in"),
    33: ("test_submitting.py", "test_a_payload_comes_back_as_it_went_in"),
    37: ("test_bad_inputs_sqlite.py", "test_payload_with_many_names_is_stored"),
    38: ("test_submitting.py", "test_a_payload_comes_back_as_it_went_in"),
    41: ("test_submitting.py", "test_a_payload_comes_back_as_it_went_in"),
    89: ("../conformance/test_opening_postgres.py", "schema"),
    90: ("test_jobs.py", "test_unknown_job_differs_from_an_unknown_path"),
    92: ("test_events_sqlite.py", "test_an_id_that_was_never_given_is_refused"),
    93: ("../unit/test_metrics.py", "test_tasks_beyond_the_cap_are_one_series"),
    94: ("test_keys_sqlite.py", "test_every_invalid_key_gets_the_same_answer"),
    95: ("test_admission_sqlite.py", "test_a_key_has_a_rate_wherever_it_is_used"),
}
"""Rows that have no line above, or more than that: the test that has them."""
NOWHERE = {
    25: "no operation serves files, so none looks at Range",
    40: "nothing is exported as CSV",
    56: "unique states do not exist",
}
"""Rows of what there is not."""
ROWS = {1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 21, 22, 24, 25, 26, 28, 29, 30, 32, 33, 34, 36, 37, 38} | {
    40,
    41,
    48,
    49,
    50,
    52,
    53,
    54,
    56,
    57,
    58,
    89,
    90,
    92,
    93,
    94,
    95,
}
"""The numbers of all rows that come over HTTP."""
