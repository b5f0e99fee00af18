"""Limits of requests: a token bucket for each name, in bounded memory, and a limit of long polls.

Each process counts separately. A long poll occupies a connection.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple

from holdfast.core.clock import Clock
from holdfast.settings.settings import Settings
from holdfast.web.keys import Principal
from holdfast.web.messages import Header, Refusal

_MAX_NAMES = 10_000


class TokenGrant(NamedTuple):
    """Result of a request for a token."""

    allowed: bool
    left: int
    wait: float  # seconds until the next token


class Rate:
    """Rate limiter with a token bucket for each name. Beyond a number of names, the least recently used bucket is
    dropped, and is full at its next use."""

    def __init__(self, what: str, per_second: float, burst: int, clock: Clock) -> None:
        self.what = what
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and the instant of that count

    def take(self, name: str) -> TokenGrant:
        """Takes a token of a name, if there is one."""
        now = self._clock.monotonic()
        tokens, at = self._buckets.pop(name, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - at) * self._per_second)
        allowed = tokens >= 1
        self._buckets[name] = (tokens - allowed, now)
        if len(self._buckets) > _MAX_NAMES:
            self._buckets.popitem(last=False)
        return TokenGrant(allowed, int(tokens - allowed), 0.0 if allowed else (1 - tokens) / self._per_second)

    def rate_headers(self, taken: TokenGrant) -> tuple[Header, Header]:
        """Returns the rate limit's headers."""
        window = math.ceil(self._burst / self._per_second)  # seconds in which an empty bucket fills
        policy = f'"{self.what}";q={self._burst};w={window}'
        return (
            (b"ratelimit-policy", policy.encode()),
            (b"ratelimit", f'"{self.what}";r={taken.left};t={math.ceil(taken.wait)}'.encode()),
        )

    def rate_refusal(self, taken: TokenGrant, detail: str = "") -> Refusal:
        """Returns the refusal for a missing token."""
        seconds = max(1, math.ceil(taken.wait))
        detail = detail or f"these are more requests than one {self.what} may make"
        retry = (b"retry-after", str(seconds).encode())
        return Refusal(429, "too_many_requests", detail, f"try again in {seconds} s", retry)


_RETRY_AFTER = b"5"  # seconds: waits end as jobs arrive and end


class WaitLimiter:
    """Limiter of long polls, one for each ``Api``."""

    def __init__(self, settings: Settings) -> None:
        self._max_long_polls = max(1, settings.connections * 3 // 4)
        self._max_per_key = settings.long_polls_per_key
        self._long_polls: Counter[str] = Counter()
        self._counting = threading.Lock()  # event loops may run in several threads

    @contextmanager
    def limit_wait(self, caller: Principal) -> Iterator[None]:
        """Counts a long poll while entered; raises Refusal if too many wait."""
        name = caller.key or address_network(caller.address)
        with self._counting:
            self._add_long_poll(name)
        try:
            yield
        finally:
            with self._counting:
                self._long_polls[name] -= 1
                if not self._long_polls[name]:
                    del self._long_polls[name]

    def _add_long_poll(self, name: str) -> None:
        if self._long_polls[name] >= self._max_per_key:
            raise _refusal(
                f"{self._max_per_key:,} of your requests wait, as many as the setting long_polls_per_key allows"
            )
        if self._long_polls.total() >= self._max_long_polls:
            raise _refusal(f"{self._max_long_polls:,} requests wait, as many as three quarters of the connections")
        self._long_polls[name] += 1


def _refusal(detail: str) -> Refusal:
    retry = (b"retry-after", _RETRY_AFTER)
    return Refusal(429, "too_many_long_polls", detail, "let some of them end first, or ask without wait", retry)


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


class Proxies:
    """Trusted proxies: their X-Forwarded-For headers name the client's address."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks: tuple[Network, ...] = tuple(map(ip_network, networks))

    def client_of(self, peer: str, headers: Iterable[Header]) -> str:
        """Returns the client's address: the peer, or behind trusted proxies the last address that is not a proxy's."""
        if not self._networks or not self.is_trusted(peer):
            return peer
        named = [value.decode("latin-1") for name, value in headers if name == b"x-forwarded-for"]
        client = peer
        for each in reversed(",".join(named).split(",")):
            address = _parsed(each.strip())
            if address is None:
                break
            client = str(address)
            if not self.is_trusted(client):
                break
        return client

    def is_forwarded_tls(self, scope: Mapping[str, Any]) -> bool:
        """Returns True if a trusted proxy says by X-Forwarded-Proto that its client speaks TLS."""
        peer = (scope.get("client") or ("",))[0]
        if not self._networks or not self.is_trusted(peer):
            return False
        named = [value.strip().lower() for name, value in scope["headers"] if name == b"x-forwarded-proto"]
        return named == [b"https"]

    def is_trusted(self, text: str) -> bool:
        """Returns True if this is the address of a trusted proxy."""
        address = _parsed(text)
        return address is not None and any(
            address in network for network in self._networks if network.version == address.version
        )


def address_network(text: str) -> str:
    """Returns the network that counts as one address: for IPv6 the usual network of a single host."""
    address = _parsed(text)
    if not isinstance(address, IPv6Address):
        return text
    return str(IPv6Network((address, 64), strict=False))


def _parsed(text: str) -> Address | None:
    try:
        address = ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def host_of(header: bytes) -> str | None:
    """Returns the name in a Host header, in lower case, without the port; None if the header is invalid."""
    found = _HOST.fullmatch(header.decode("latin-1"))
    return None if found is None else found[1].lower().rstrip(".")


def is_unforgeable(host: str) -> bool:
    """Returns True for a name that DNS rebinding cannot use: an address, or a name without a dot."""
    return _parsed(host) is not None or "." not in host or host.endswith(".localhost")
