"""Address of a request's client, and the host name it used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from holdfast.web.responses import Header

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


class Proxies:
    """Proxies whose word about the client's address is trusted."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks: tuple[Network, ...] = tuple(map(ip_network, networks))

    def client_of(self, peer: str, headers: Iterable[Header]) -> str:
        """The client's address: the peer, or behind trusted proxies the last address that is not a proxy's."""
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

    def is_trusted(self, text: str) -> bool:
        """Returns True if this is the address of one of them."""
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
    """The name in a Host header, in small letters, without its port; None: there is no sense in it."""
    found = _HOST.fullmatch(header.decode("latin-1"))
    return None if found is None else found[1].lower().rstrip(".")


def is_unforgeable(host: str) -> bool:
    """Returns True if no page of another site could have got a browser to come here under this name: an address, or a
    name without a dot, which no outsider can own.
    """
    return _parsed(host) is not None or "." not in host or host.endswith(".localhost")
