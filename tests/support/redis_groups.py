"""Redis servers that belong together: a primary with replicas and the sentinels that watch it, a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote, urlencode

from redis import Redis as Client
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.redis import MAIN, Redis, installed
from tests.support.servers import SERVER_USER, Guarded, Port, private_folder, until

T = TypeVar("T")

SERVICE = "queue"
"""What sentinels call the primary they watch."""
_SLOTS = 16384


@contextmanager
def replicated(
    kind: str = MAIN, *, password: str = "", settings: Mapping[str, str] | None = None
) -> Iterator[tuple[Redis, Redis]]:
    """A primary and its replica, which has all that the primary has."""
    secret = {"masterauth": password} if password else {}
    settings = {"repl-diskless-sync-delay": "0", "repl-diskless-load": "disabled", **secret, **(settings or {})}
    with (
        Redis(kind, password=password, settings=settings) as primary,
        Redis(kind, password=password, settings=settings) as replica,
    ):
        follow(replica, primary)
        yield primary, replica


def follow(replica: Redis, primary: Redis) -> None:
    """Become a replica; returns when everything is there."""
    patiently(lambda: replica.execute("REPLICAOF", "127.0.0.1", primary.port))
    until(lambda: role_of(replica)[:4:3] == [b"slave", b"connected"], "the replica to have everything")


def role_of(server: Redis) -> list[bytes]:
    """What the server says it is: ``master``, or ``slave`` of host, port, and the state of that."""
    return list(patiently(lambda: server.execute("ROLE")))


def patiently(call: Callable[[], T]) -> T:
    """What the call returns, though sentinels throw everybody out when they change a server's role."""
    answers: list[T] = []

    def answered() -> bool:
        with suppress(exceptions.ConnectionError):
            answers.append(call())
        return bool(answers)

    until(answered, "a server to answer")
    return answers[0]


class Sentinel:
    """One sentinel that watches a primary and promotes its replica all by itself. Use it with ``with``.

    ``down_after``: milliseconds of silence after which a server counts as gone. A busy one may be silent for a second:
    who promotes its replica meanwhile has two primaries."""

    def __init__(self, primary: Redis, *, down_after: int = 1000) -> None:
        self._folder = private_folder("sentinel")
        self._port = Port()
        self._guarded = Guarded(self._folder)
        file = self._folder / "sentinel.conf"
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._folder}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 1",
            f"sentinel down-after-milliseconds {SERVICE} {down_after}",
            f"sentinel failover-timeout {SERVICE} 3000",
        ]
        if primary.password:
            lines.append(f'sentinel auth-pass {SERVICE} "{primary.password}"')
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if SERVER_USER is not None:
            os.chown(file, SERVER_USER, SERVER_USER)
        self._argv = [installed(primary.kind), file, "--sentinel"]
        self._password = primary.password

    @property
    def port(self) -> int:
        return self._port.number

    def __enter__(self) -> Sentinel:
        with ExitStack() as undo:
            undo.callback(self._close)
            self._guarded.start(self._argv)
            until(lambda: self._knows("num-slaves", "1"), "the sentinel to know the replica")
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._guarded.close()
        self._port.release()

    def _knows(self, field: str, value: str) -> bool:
        return self._asked("MASTER").get(field) == value

    def _asked(self, whom: str) -> dict[str, str]:
        """What the sentinel knows of the primary, or of its replica; nothing where it does not answer."""
        try:
            with Client(port=self.port, protocol=2, decode_responses=True, retry=Retry(NoBackoff(), 0)) as client:
                reply = client.execute_command("SENTINEL", whom, SERVICE)
        except (exceptions.ConnectionError, exceptions.ResponseError):
            return {}
        flat = reply[0] if whom == "REPLICAS" else reply
        known = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        return {str(name): str(value) for name, value in known.items()}

    def await_order(self, primary: Redis, replica: Redis) -> None:
        """Wait until it would promote this replica, were this primary gone."""

        def ready() -> bool:
            first, second = self._asked("MASTER"), self._asked("REPLICAS")
            return (
                (first.get("port"), first.get("flags")) == (str(primary.port), "master")
                and (second.get("port"), second.get("flags")) == (str(replica.port), "slave")
                and (second.get("master-link-status"), second.get("master-port")) == ("ok", str(primary.port))
            )

        until(ready, "the sentinel to know who is who")

    def url(self, **parameters: str) -> str:
        """Through this sentinel to whatever is the primary."""
        secret = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"redis+sentinel://{secret}127.0.0.1:{self.port}/{SERVICE}/0?{urlencode(parameters)}"


class Cluster:
    """Nodes that share out the slots, and one replica for each that is asked for. Use it with ``with``.

    ``patience``: milliseconds of silence after which a node counts as gone."""

    def __init__(self, primaries: int = 3, *, patience: int = 15_000) -> None:
        self._primaries = primaries
        self._patience = patience
        self._undo = ExitStack()
        self.nodes: list[Redis] = []
        self._buses: list[Port] = []

    def __enter__(self) -> Cluster:
        with ExitStack() as undo:
            undo.callback(self._release)
            for _ in range(self._primaries):
                self.add(undo)
            share = -(-_SLOTS // self._primaries)
            for number, node in enumerate(self.nodes):
                node.execute("CLUSTER", "ADDSLOTSRANGE", number * share, min(_SLOTS, (number + 1) * share) - 1)
            self._settled(self.nodes)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.__exit__(kind, error, trace)

    def _release(self) -> None:
        for bus in self._buses:
            bus.release()

    def add(self, undo: ExitStack | None = None) -> Redis:
        """One more node, known to the others."""
        bus = Port()
        self._buses.append(bus)
        settings = {
            "cluster-enabled": "yes",
            "cluster-port": str(bus.number),
            "cluster-node-timeout": str(self._patience),
            "cluster-replica-validity-factor": "0",
            "repl-diskless-sync-delay": "0",
        }
        node = (undo or self._undo).enter_context(Redis(settings=settings))
        if self.nodes:
            node.execute("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, self._buses[0].number)
        self.nodes.append(node)
        return node

    def replica_of(self, primary: Redis) -> Redis:
        """A replica of a node, which has all that the node has."""
        name = primary.execute("CLUSTER", "MYID")
        node = self.add()
        self._settled(self.nodes)
        until(lambda: name in node.execute("CLUSTER", "NODES"), "the replica to know its primary")
        node.execute("CLUSTER", "REPLICATE", name)
        until(lambda: role_of(node)[:4:3] == [b"slave", b"connected"], "the replica to have everything")
        until(lambda: b"slave" in self.nodes[0].execute("CLUSTER", "NODES"), "the others to know the replica")
        return node

    @staticmethod
    def _settled(nodes: Sequence[Redis]) -> None:
        def whole(node: Redis) -> bool:
            known = node.execute("CLUSTER", "INFO")
            return b"cluster_state:ok" in known and b"cluster_known_nodes:%d\r" % len(nodes) in known

        until(lambda: all(map(whole, nodes)), "the cluster to be whole")

    def owner(self, key: str) -> Redis:
        """The node that serves the slot of a key now; in between, none may."""
        found: list[Redis] = []
        until(lambda: found.extend(node for node in self.nodes if _serves(node, key)) or bool(found), f"{key}'s owner")
        return found[0]

    def url(self, **parameters: str) -> str:
        """By the names of the first nodes."""
        places = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[: self._primaries])
        return f"redis+cluster://{places}?{urlencode(parameters)}"


def _serves(node: Redis, key: str) -> bool:
    if not node.alive():
        return False
    try:
        node.execute("EXISTS", key)
    except exceptions.ResponseError:  # moved
        return False
    return role_of(node)[0] == b"master"
