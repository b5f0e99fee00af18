"""Admission of requests: rates, addresses behind proxies, pages of other sites, names the API is called by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import Holdfast
from holdfast.core.clock import ManualClock
from holdfast.web.asgi import Api as Application
from holdfast.web.messages import Refusal
from holdfast.web.rate_limit import Proxies, Rate, address_network, host_of, is_unforgeable
from tests.web.client import JSON, check_form
from tests.web.keyed import Keys, refused

SITE = "https://app.example"
BODY = {"content": b'{"task": "work", "payload": {}}'}


class Front:
    """The application, asked from any address under any name."""

    def __init__(self, folder: Path, *, checks_hosts: bool = False, **settings: Any) -> None:
        self.clock = ManualClock()
        self.app = Holdfast(f"sqlite:///{folder}/jobs.db", clock=self.clock, **settings)
        self._application = Application(self.app, checks_hosts=checks_hosts)
        self.runner = asyncio.Runner()

    def ask(
        self, method: str, path: str, *, peer: str = "10.1.1.1", site: str = "http://api", **given: Any
    ) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._application, client=(peer, 5))
            async with httpx.AsyncClient(transport=transport, base_url=site) as client:
                return await client.request(method, path, **given)

        answer = self.runner.run(send())
        check_form(answer)
        return answer

    def statuses(self, count: int, path: str = "/health", **given: Any) -> list[int]:
        return [self.ask("GET", path, **given).status_code for _ in range(count)]


@contextmanager
def _front(folder: Path, **settings: Any) -> Iterator[Front]:
    front = Front(folder, **settings)

    async def close() -> None:
        closing: Awaitable[None] = front.app.close()
        await closing

    try:
        yield front
    finally:
        front.runner.run(close())
        front.runner.close()


# ── rates ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_rate_allows_a_burst_and_then_so_many_per_second() -> None:
    clock = ManualClock()
    rate = Rate("key", 2, 3, clock)
    taken = [rate.take("a") for _ in range(4)]
    assert [(each.allowed, each.left) for each in taken] == [(True, 2), (True, 1), (True, 0), (False, 0)]
    assert taken[-1].wait == pytest.approx(0.5)
    assert rate.take("b").allowed
    clock.advance(0.5)
    assert [rate.take("a").allowed for _ in range(2)] == [True, False]
    clock.advance(3600)
    assert [rate.take("a").allowed for _ in range(4)] == [True, True, True, False]
    assert isinstance(rate.rate_refusal(rate.take("a")), Refusal)


def test_many_names_take_no_more_memory() -> None:
    rate = Rate("address", 1, 1, ManualClock())
    for number in range(20_000):
        rate.take(str(number))
    assert not rate.take("19999").allowed
    assert rate.take("0").allowed  # forgotten


def test_an_address_has_a_rate(tmp_path: Path) -> None:
    with _front(tmp_path, address_rate=2, rate_burst=3) as front:
        answers = [front.ask("GET", "/health") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert answers[0].headers["ratelimit-policy"] == '"address";q=3;w=2'
        assert [answer.headers["ratelimit"] for answer in answers] == [
            '"address";r=2;t=0',
            '"address";r=1;t=0',
            '"address";r=0;t=0',
            '"address";r=0;t=1',
        ]
        assert refused(answers[-1], 429, "too_many_requests")["remedy"] == "try again in 1 s"
        assert answers[-1].headers["retry-after"] == "1"
        assert front.statuses(1, peer="10.1.1.2") == [200]
        assert front.statuses(5, "/health/live") == [200] * 5
        front.clock.advance(1)
        assert front.statuses(3) == [200, 200, 429]


def test_a_key_has_a_rate_wherever_it_is_used(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    shown = {"authorization": f"Bearer {keys.make('read')}"}
    other = {"authorization": f"Bearer {keys.make('read')}"}
    with _front(tmp_path, keys_file=str(keys.path), key_rate=1, rate_burst=2) as front:
        assert front.statuses(2, "/v1/queues", headers=shown) == [200, 200]
        assert front.statuses(1, "/v1/queues", headers=shown, peer="10.9.9.9") == [429]
        assert front.statuses(1, "/v1/queues", headers=other) == [200]


def test_bad_keys_make_an_address_wait_and_good_ones_never(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    good, bad = ({"x-api-key": key} for key in (keys.make("read"), "hf_aaaaaaaa_" + "0" * 64))
    with _front(tmp_path, keys_file=str(keys.path), refused_keys=3) as front:
        assert front.statuses(5, "/v1/queues", headers=bad) == [401, 401, 401, 429, 429]
        assert front.statuses(2, "/v1/queues", headers=good) == [200, 200]
        assert front.statuses(1, "/v1/queues", headers=bad, peer="10.9.9.9") == [401]
        front.clock.advance(20)
        assert front.statuses(2, "/v1/queues", headers=bad) == [401, 429]
        assert "refused keys" in front.ask("GET", "/v1/queues", headers=bad).json()["detail"]


# ── addresses ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("peer", "given", "client"),
    [
        ("10.0.0.1", ["203.0.113.5"], "203.0.113.5"),
        ("10.0.0.1", ["1.1.1.1, 203.0.113.5, 10.0.0.2"], "203.0.113.5"),
        ("10.0.0.1", ["1.1.1.1", "203.0.113.5"], "203.0.113.5"),
        ("10.0.0.1", ["nonsense, 203.0.113.5"], "203.0.113.5"),
        ("10.0.0.1", ["203.0.113.5, nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["2001:db8::1"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["203.0.113.5"], "203.0.113.5"),
        ("192.0.2.1", ["203.0.113.5"], "192.0.2.1"),
        ("", ["203.0.113.5"], ""),
    ],
    ids=str,
)
def test_only_a_trusted_proxys_word_counts(peer: str, given: list[str], client: str) -> None:
    headers = [(b"x-forwarded-for", each.encode()) for each in given]
    assert Proxies(["10.0.0.0/24", "fd00::/8"]).client_of(peer, headers) == client
    assert Proxies([]).client_of(peer, headers) == peer


def test_an_ipv6_network_counts_as_one_address() -> None:
    assert address_network("2001:db8::1") == address_network("2001:db8::2:3") != address_network("2001:db8:0:1::1")
    assert [address_network(each) for each in ("10.0.0.1", "", "unix")] == ["10.0.0.1", "", "unix"]


def test_behind_a_proxy_each_client_has_a_rate(tmp_path: Path) -> None:
    with _front(tmp_path, address_rate=1, rate_burst=1, trusted_proxies="10.1.1.1") as front:
        first, second = ({"x-forwarded-for": each} for each in ("203.0.113.5", "203.0.113.6"))
        assert [front.statuses(1, headers=each) for each in (first, second, first)] == [[200], [200], [429]]


# ── browsers ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 201),
        ({"sec-fetch-site": "same-origin", "origin": "http://api"}, 201),
        ({"sec-fetch-site": "none"}, 201),
        ({"origin": "http://api"}, 201),
        ({"origin": SITE, "sec-fetch-site": "cross-site"}, 201),  # named in the settings
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "https://app.example.evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
    ],
    ids=str,
)
def test_pages_of_other_sites_change_nothing(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    with _front(tmp_path, allowed_origins=SITE) as front:
        answer = front.ask("POST", "/v1/jobs", headers={**JSON, **headers}, **BODY)
        assert answer.status_code == status
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == (SITE if headers.get("origin") == SITE else None)
        assert answer.headers["vary"] == "origin"


def test_a_browser_may_ask_first_for_a_named_site_only(tmp_path: Path) -> None:
    def ask(front: Front, origin: str) -> httpx.Response:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        return front.ask("OPTIONS", "/v1/jobs", headers=headers)

    keys = Keys(tmp_path)
    with _front(tmp_path, allowed_origins=SITE, keys_file=str(keys.path)) as front:
        reported = ask(front, SITE)
        assert (reported.status_code, reported.headers["access-control-allow-origin"]) == (204, SITE)
        assert "authorization" in reported.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in reported.headers
        other = ask(front, "https://evil.example")
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (405, False)
    with _front(tmp_path) as front:
        answer = ask(front, SITE)
        assert (answer.status_code, "vary" in answer.headers) == (405, False)


@pytest.mark.parametrize("origin", ["*", "app.example", "https://app.example/", "https://a.example;x"])
def test_an_origin_is_named_exactly(origin: str) -> None:
    with pytest.raises(Exception, match="allowed_origins"):
        Holdfast(allowed_origins=origin)


@pytest.mark.parametrize(
    ("site", "status"),
    [
        ("http://127.0.0.1:8000", 200),
        ("http://localhost:8000", 200),
        ("http://api", 200),
        ("http://[::1]:8000", 200),
        ("http://dev.localhost", 200),
        ("http://Jobs.Example.", 200),
        ("http://evil.example", 421),
        ("http://jobs.example.evil.example", 421),
        ("http://localhost.evil.example", 421),
    ],
)
def test_unknown_host_names_are_refused(tmp_path: Path, site: str, status: int) -> None:
    with _front(tmp_path, checks_hosts=True, allowed_hosts="jobs.example") as front:
        assert front.statuses(1, site=site) == [status]


def test_mounted_or_with_keys_the_name_does_not_matter(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with _front(tmp_path) as front:
        assert front.statuses(1, site="http://somebody.example") == [200]
    with _front(tmp_path, checks_hosts=True, keys_file=str(keys.path)) as front:
        assert front.statuses(1, site="http://somebody.example") == [200]
    with _front(tmp_path, checks_hosts=True) as front:
        assert front.statuses(1, headers={"host": "two hosts"}) == [421]


def test_hosts_are_read_as_they_are_written() -> None:
    given = ["A.example:80", "[::1]:80", "[::1]", "a b", "", "a:b", "a\x00"]
    assert [host_of(each.encode()) for each in given] == ["a.example", "[::1]", "[::1]", None, None, None, None]
    assert [is_unforgeable(each) for each in ("[::1]", "10.0.0.1", "api", "a.b", "10.0.0.1.nip.io")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_every_answer_has_the_headers_that_keep_browsers_careful(tmp_path: Path) -> None:
    with _front(tmp_path) as front:
        for path in ("/health", "/absent", "/v1/jobs"):
            headers = front.ask("GET", path, site="https://api").headers
            assert headers["x-frame-options"] == "DENY"
            assert headers["cache-control"] == "no-store"
            assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["strict-transport-security"] == "max-age=31536000"
        assert "strict-transport-security" not in front.ask("GET", "/health").headers
