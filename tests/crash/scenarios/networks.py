"""A network between the fleet and its server that refuses, goes silent and cuts off: RELIABILITY F12–F16."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from tests.crash.fleet import until
from tests.crash.report import Report
from tests.crash.scenarios import waits
from tests.crash.scenarios.kinds import Kind
from tests.crash.scenarios.load import PATIENCE, Load
from tests.support.fault_proxy import FaultProxy


@contextmanager
def _load(folder: Path, kind: Kind, seed: int) -> Iterator[tuple[Load, FaultProxy]]:
    """A fleet that reaches its server through the proxy."""
    with kind.start() as server, FaultProxy(server.port) as proxy:
        direct = kind.url(server)
        through = direct.replace(f":{server.port}/", f":{proxy.port}/")
        with Load(folder, lambda _: nullcontext(through), direct=direct) as load:
            load.report.figures["seed"] = seed
            time.sleep(random.Random(seed).uniform(0.2, 1.0))
            yield load, proxy


def refused(folder: Path, kind: Kind, *, seconds: float, within: float, busy: float, seed: int) -> Report:
    """The server refuses every connection: workers use at most the share ``busy`` of a processor meanwhile."""

    def refuse(proxy: FaultProxy) -> None:
        proxy.refuse()
        proxy.cut()

    return _without(folder, kind, refuse, FaultProxy.accept, seconds=seconds, within=within, busy=busy, seed=seed)


def silent(folder: Path, kind: Kind, *, seconds: float, within: float, busy: float, seed: int) -> Report:
    """Everything is swallowed, in both directions, and delivered late."""
    return _without(
        folder, kind, FaultProxy.hold, FaultProxy.heal, seconds=seconds, within=within, busy=busy, seed=seed
    )


def _without(
    folder: Path,
    kind: Kind,
    begin: Callable[[FaultProxy], object],
    end: Callable[[FaultProxy], object],
    *,
    seconds: float,
    within: float,
    busy: float,
    seed: int,
) -> Report:
    with _load(folder, kind, seed) as (load, proxy):
        gone, used = time.monotonic(), load.cpu_seconds()
        begin(proxy)
        time.sleep(seconds)
        share = (load.cpu_seconds() - used) / (time.monotonic() - gone)
        end(proxy)
        load.resumed(gone, time.monotonic(), within=within)
        load.report.expect(share <= busy, f"a worker without a store used {share:.0%} of a processor")
        load.report.figures |= {"seconds": seconds, "busiest worker": f"{share:.1%} of a processor"}
        return load.judged()


def half_open(folder: Path, kind: Kind, *, times: int, within: float, seed: int) -> Report:
    """Connections stay, and nothing comes back on them; new ones work: each process finds out and takes new ones."""
    with _load(folder, kind, seed) as (load, proxy):
        for _ in range(times):
            gone = time.monotonic()
            proxy.hold(to_server=False, of=kind.greeting)
            load.resumed(gone, gone, within=within)
        load.report.figures["times"] = times
        return load.judged()


def cut_fan_ins(folder: Path, kind: Kind, *, groups: int, members: int, kills: int, seed: int) -> Report:
    """Fan-ins whose workers are killed, and whose connections are cut between two kills."""
    with kind.start() as server, FaultProxy(server.port) as proxy:
        direct = kind.url(server)
        through = direct.replace(f":{server.port}/", f":{proxy.port}/")
        report = waits.fan_ins(
            folder,
            lambda _: nullcontext(through),
            groups=groups,
            members=members,
            kills=kills,
            seed=seed,
            direct=direct,
            cut=proxy.cut,
        )
        report.figures["cuts"] = proxy.cuts
        return report


def _cut_since(proxy: FaultProxy, before: int) -> bool:
    return proxy.cuts > before


def cut(folder: Path, kind: Kind, *, cuts: int, seed: int) -> Report:
    """The connection is cut when the server has committed and before its answer arrives, again and again."""
    rng = random.Random(seed)
    with _load(folder, kind, seed) as (load, proxy):
        began = time.monotonic()
        while proxy.cuts < cuts:
            given, answer = rng.choice(kind.answers)
            before = proxy.cuts
            proxy.cut_after(given, answer=answer)
            until(partial(_cut_since, proxy, before), PATIENCE, "a connection to be cut", pause=0.005)
        now = time.monotonic()
        load.resumed(began, now, within=PATIENCE)
        load.report.figures |= {"cuts": proxy.cuts, "cuts a second": round(cuts / (now - began), 1)}
        return load.judged()
