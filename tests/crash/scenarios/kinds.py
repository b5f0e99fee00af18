"""What scenarios of servers and networks need of each kind of server that keeps the jobs of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tests.support import postgres, redis
from tests.support.postgres import Postgres
from tests.support.redis import Redis


class Server(Protocol):
    """A server of a test's own."""

    @property
    def port(self) -> int: ...

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def url(self, **parameters: Any) -> str: ...


@dataclass(frozen=True)
class Kind:
    """Servers that lose nothing they have acknowledged, and what clients say to them."""

    start: Callable[[], AbstractContextManager[Server]]
    parameters: Mapping[str, str]
    """Of the URL of an empty store on it."""
    greeting: bytes
    """The input of each connection that was ever accepted."""
    answers: Sequence[tuple[bytes, bytes]]
    """What to say and be answered to be cut off: a submission, and a settlement. An empty answer is any."""

    def url(self, server: Server) -> str:
        """Of the fleet's store on this server."""
        return server.url(**self.parameters)


COMMAND_COMPLETE = b"C\0\0\0"
"""First bytes of PostgreSQL's answer to any statement. A settlement is an update, or, when it is sent again after its
answer was cut off, a query."""
POSTGRES = Kind(
    start=lambda: Postgres(authenticated=True),
    parameters={"schema": "crash"},
    greeting=b"user",
    answers=((b'"by"', b""), (b'{"claims":', COMMAND_COMPLETE)),
)
DURABLE = {"namespace": "crash", "durability": "always"}
REDIS = Kind(
    start=lambda: Redis(password=redis.PASSWORD, settings={"appendfsync": "always"}),
    parameters=DURABLE,
    greeting=b"AUTH",
    answers=((b'"by"', b""), (b'{"claims":', b"")),
)
KINDS = {"postgres": POSTGRES, "redis": REDIS}
"""By the name of the store."""
SECRETS = frozenset({postgres.PASSWORD, redis.PASSWORD})
"""What no log may show."""
