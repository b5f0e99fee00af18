"""The trouble that processes and their servers are in while they write a history."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.settings.types import PREFIX
from tests.crash.fleet import ACTOR, Fleet
from tests.crash.scenarios.kinds import POSTGRES, REDIS, Server
from tests.storm.history.actor import CLOCK_FILE, LEASE, LEASE_US
from tests.storm.history.checker import Terms
from tests.support import postgres
from tests.support.fault_proxy import FaultProxy
from tests.support.postgres import Postgres
from tests.support.stores import CARRIED, sqlite_file

CAST = ("client", "client", "worker", "worker", "product", "product", "operator")
ORDER_US = 3_000_000
"""PostgreSQL passes over jobs for up to 2 seconds (docs/postgresql.md), longer on a busy machine."""
WRONG_CLOCKS = (0, 0, 3600, -3600)  # seconds
SAID = (b"history", b"worker-", b"client-", b"product-")
"""Texts in submissions, claims, heartbeats, steps and settlements."""
FAILOVERS = "postgres_failover"
ARENAS = ("sqlite", "postgres", "redis", *sorted(CARRIED), FAILOVERS)
"""Stores and transports, and a PostgreSQL whose standby takes over."""


@dataclass
class Arena:
    """A store, its servers, and the proxies on the way to them. ``promote`` replaces the primary by its standby."""

    fleet: Fleet
    terms: Terms
    proxies: Sequence[FaultProxy] = ()
    servers: Sequence[Server] = ()
    promote: Callable[[], None] | None = None


@contextmanager
def open_arena(name: str, folder: Path) -> Iterator[Arena]:
    """An empty store, with servers of its own."""
    with ExitStack() as stack:
        if name == "sqlite":
            yield Arena(stack.enter_context(Fleet(folder, sqlite_file)), Terms())
            return
        if name == FAILOVERS:
            yield _replicated(stack, folder)
            return
        kind = REDIS if name == "redis" else POSTGRES
        server, proxy = _behind_proxy(stack, kind.start())
        servers, proxies = [server], [proxy]
        if name in CARRIED:
            carrier, second = _behind_proxy(stack, REDIS.start())
            given = {"TRANSPORT": name.replace("postgres", "redis"), "TRANSPORT_URL": carrier.url()}
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for setting, value in given.items():
                patch.setenv(PREFIX + setting, _through(value, carrier, second))
            servers, proxies = [server, carrier], [proxy, second]
        order_us = None if name in CARRIED else ORDER_US if kind is POSTGRES else 0
        fleet = _fleet(stack, folder, kind.url(server), servers[:1], proxies[:1])
        terms = Terms(order_us=order_us, passes_locked=kind is POSTGRES, repeats_lost=True)
        yield Arena(fleet, terms, proxies, servers)


def _behind_proxy(stack: ExitStack, starting: AbstractContextManager[Server]) -> tuple[Server, FaultProxy]:
    server = stack.enter_context(starting)
    return server, stack.enter_context(FaultProxy(server.port))


def _through(url: str, server: Server, proxy: FaultProxy) -> str:
    return url.replace(f"127.0.0.1:{server.port}", f"127.0.0.1:{proxy.port}")


def _fleet(
    stack: ExitStack, folder: Path, direct: str, servers: Sequence[Server], proxies: Sequence[FaultProxy]
) -> Fleet:
    through = direct
    for server, proxy in zip(servers, proxies, strict=True):
        through = _through(through, server, proxy)
    return stack.enter_context(Fleet(folder, lambda _: nullcontext(through), direct=direct))


def _replicated(stack: ExitStack, folder: Path) -> Arena:
    """A PostgreSQL with a synchronous standby."""
    pair = [stack.enter_context(Postgres(authenticated=True))]
    pair.append(stack.enter_context(pair[0].standby()))
    proxies = [stack.enter_context(FaultProxy(server.port)) for server in pair]
    fleet = _fleet(stack, folder, postgres.url(*pair, schema="crash"), pair, proxies)

    def promote() -> None:
        primary, standby = pair
        primary.kill()
        standby.promote()
        primary.follow(standby)
        pair.reverse()

    terms = Terms(order_us=ORDER_US, passes_locked=True, repeats_lost=True)
    return Arena(fleet, terms, proxies, promote=promote)


class Nemesis:
    """Starts the processes of a history and makes trouble until they end."""

    def __init__(self, arena: Arena, folder: Path, seed: int, seconds: float, fault: str | None) -> None:
        self.counts: dict[str, int] = {}
        self._arena = arena
        self._folder = folder
        self._rng = random.Random(seed)
        self._fault = fault or ""
        self._clock = folder / CLOCK_FILE
        self._clock.write_bytes(bytes(8))
        self._started = 0
        self._until = time.monotonic() + seconds
        self._actors: dict[subprocess.Popen[bytes], str] = {}

    def run(self) -> None:
        """Makes trouble, heals it, and lets a last worker end what is left."""
        for role in CAST:
            self.start(role)
        actions = self._actions()
        while (left := self._until - time.monotonic()) > 0:
            time.sleep(min(left, self._rng.uniform(0.2, 1.0)))
            action = self._rng.choice(actions)
            self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1
            action()
        for proxy in self._arena.proxies:
            proxy.heal()
        for actor in self._actors:
            self._arena.fleet.await_end(actor, 60, "the actors to end")
        finisher = self.start("finisher", until=time.monotonic() + 60)
        self._arena.fleet.await_end(finisher, 90, "the last worker to end")

    def _actions(self) -> list[Callable[[], None]]:
        """Returns what can go wrong here; servers fall less often than processes and connections."""
        actions = [self.kill, self.freeze, self.freeze] * 2
        if self._arena.proxies:
            actions += [self.cut, self.lose_answers, self.lose_answers, self.hold, self.hold_answers] * 2
        else:
            actions += [self.turn_clock]
        if self._arena.servers:
            actions += [self.restart_server]
        if self._arena.promote is not None:
            actions += [self.fail_over]
        return actions

    def start(self, role: str, until: float | None = None) -> subprocess.Popen[bytes]:
        """Starts a process of this role, with a clock that may be wrong."""
        self._started += 1
        name = f"{role}-{self._started}"
        clock = str(self._rng.choice(WRONG_CLOCKS))
        seed, ends = str(self._rng.randrange(1 << 32)), str(until or self._until)
        arguments = (role, name, seed, str(self._folder), ends)
        process = self._arena.fleet.start(ACTOR, *arguments, HISTORY_CLOCK=clock, HISTORY_FAULT=self._fault)
        if until is None:
            self._actors[process] = role
        return process

    def _victim(self) -> subprocess.Popen[bytes]:
        return self._rng.choice(list(self._actors))

    def kill(self) -> None:
        """SIGKILL of a process; another one of its role takes its place."""
        victim = self._victim()
        victim.kill()
        victim.wait()
        self.start(self._actors.pop(victim))

    def freeze(self) -> None:
        """SIGSTOP of a process, mostly for longer than its leases last."""
        victim = self._victim()
        with suppress(ProcessLookupError):  # its time was over
            os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(self._rng.uniform(0.3, 1.6) * LEASE.total_seconds())
            os.kill(victim.pid, signal.SIGCONT)

    def turn_clock(self) -> None:
        """Turns the host's clock on, for the processes of a SQLite file."""
        turned = int.from_bytes(self._clock.read_bytes(), "little")
        turned += round(self._rng.uniform(0.1, 2.0) * LEASE_US)
        with self._clock.open("r+b") as file:
            file.write(turned.to_bytes(8, "little"))

    def cut(self) -> None:
        """Resets the connections to one server."""
        self._rng.choice(self._arena.proxies).cut()

    def lose_answers(self) -> None:
        """Resets the next connections that say one of these, when the server has answered."""
        proxy = self._rng.choice(self._arena.proxies)
        proxy.cut_after(self._rng.choice(SAID), times=self._rng.randint(1, 4))

    def hold(self) -> None:
        """Holds back what is sent to one server and what it answers; late, or never."""
        self._hold(to_server=True)

    def hold_answers(self) -> None:
        """Holds back what one server answers."""
        self._hold(to_server=False)

    def _hold(self, *, to_server: bool) -> None:
        proxy = self._rng.choice(self._arena.proxies)
        proxy.hold(to_server=to_server)
        time.sleep(self._rng.uniform(0.1, 2.0) * LEASE.total_seconds())
        if self._rng.random() < 0.5:
            proxy.cut()
        proxy.heal()

    def restart_server(self) -> None:
        """SIGKILL of a server, which starts again."""
        server = self._rng.choice(self._arena.servers)
        server.kill()
        time.sleep(self._rng.uniform(0, 1))
        server.start()

    def fail_over(self) -> None:
        """SIGKILL of the primary, whose standby takes over."""
        assert self._arena.promote is not None
        self._arena.promote()
