"""What the storm does, and how often: the counts that the promises are proved with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.crash.report import Report
from tests.crash.scenarios import (
    api,
    chaos,
    costs,
    crowds,
    examples,
    faults,
    files,
    freezes,
    handlers,
    imports,
    javascript,
    kills,
    limits,
    networks,
    punctual,
    redis_servers,
    servers,
    siege,
    stops,
    streams,
    submitters,
    ticks,
    transports,
    waits,
    workflows,
)
from tests.crash.scenarios.kinds import KINDS, Kind
from tests.storm import alerts, mutants
from tests.storm.history import scenario as history
from tests.storm.history.nemesis import ARENAS
from tests.support.stores import CARRIED, OLDER, STORES, Home

Scenario = Callable[[Path, Callable[[int], int], int], Report]
"""``scenario(folder, count, seed)``; ``count(n)`` is n times the scale that was asked for, at least 1."""
OnStore = Callable[[Path, Home, Callable[[int], int], int], Report]
OnServer = Callable[[Path, Kind, Callable[[int], int], int], Report]

ON_EVERY_STORE: dict[str, OnStore] = {
    "kills": lambda folder, home, count, seed: kills.random_kills(
        folder, home, jobs=count(5000), kills=count(50), seed=seed
    ),
    "poison": lambda folder, home, count, _: kills.poison(folder, home, jobs=count(500), poisonous=1),
    "two-poisons": lambda folder, home, count, _: kills.poison(folder, home, jobs=count(500), poisonous=2),
    "last-attempts": lambda folder, home, count, seed: costs.last_attempts(folder, home, kills=count(50), seed=seed),
    "unprefetched": lambda folder, home, count, seed: costs.unprefetched(folder, home, kills=count(50), seed=seed),
    "usual-costs": lambda folder, home, count, seed: costs.usual(folder, home, kills=count(50), seed=seed),
    "freezes": lambda folder, home, count, seed: freezes.freezes(folder, home, count=count(50), seed=seed),
    "submitters": lambda folder, home, count, seed: submitters.killed_submitters(
        folder, home, kills=count(200), seed=seed
    ),
    "spinning": lambda folder, home, *_: handlers.spinning(folder, home, lease=2.0),
    "stubborn": lambda folder, home, count, _: handlers.stubborn(folder, home, jobs=count(10)),
    "stops": lambda folder, home, count, seed: stops.rolling_stops(folder, home, count=count(10), seed=seed),
    "second-signal": lambda folder, home, *_: stops.second_signal(folder, home),
    "deaths-at-points": lambda folder, home, count, seed: faults.killed_at(folder, home, rounds=count(10), seed=seed),
    "failures-at-points": lambda folder, home, _, seed: faults.failed_at(folder, home, seed=seed),
    "submitters-at-points": lambda folder, home, count, seed: faults.submitters_killed_at(
        folder, home, rounds=count(20), seed=seed
    ),
    "javascript": lambda folder, home, count, seed: javascript.javascript(folder, home, jobs=count(1000), seed=seed),
    "migrations": lambda folder, home, count, seed: files.raced_migrations(folder, home, rounds=count(50), seed=seed),
    "fork": lambda folder, home, *_: files.forked(folder, home),
    "twenty-shared": lambda folder, home, *_: crowds.shared(folder, home, jobs=20, seconds=0.0),
    "thousands-shared": lambda folder, home, *_: crowds.shared(folder, home, jobs=2000, seconds=0.02, share=0.3),
    "many-shared": lambda folder, home, count, _: crowds.shared(folder, home, jobs=count(50_000), seconds=0.0),
    "on-time": lambda folder, home, count, seed: punctual.punctual(
        folder, home, jobs=count(1000), within=10.0, workers=4, late=0.05, busiest=1.5, seed=seed
    ),
    "ticks": lambda folder, home, count, seed: ticks.ticks(
        folder, home, count=count(10_000), workers=5, kills=count(50), seed=seed
    ),
    "limits": lambda folder, home, count, seed: limits.limits(
        folder, home, jobs=count(1000), workers=4, kills=count(25), seed=seed
    ),
    "workflows": lambda folder, home, count, seed: workflows.workflows(
        folder, home, jobs=count(50), steps=10, kills=count(50), seed=seed
    ),
    "signals": lambda folder, home, count, seed: waits.signals(
        folder, home, count=count(10_000), kills=count(20), timeout=30.0, seed=seed
    ),
    "children": lambda folder, home, count, seed: waits.children(
        folder, home, parents=count(200), children=10, kills=count(20), seed=seed
    ),
    "fan-ins": lambda folder, home, count, seed: waits.fan_ins(
        folder, home, groups=count(100), members=100, kills=count(20), seed=seed
    ),
    "large-fan-ins": lambda folder, home, count, seed: waits.fan_ins(
        folder, home, groups=3, members=count(10_000), kills=count(10), seed=seed
    ),
    "chaos-duplicates": lambda folder, home, count, seed: chaos.balanced(
        folder, home, "duplicate-delivery", jobs=count(500), seed=seed % 2**31
    ),
    "chaos-crashes": lambda folder, home, count, seed: chaos.balanced(
        folder, home, "worker-crash", jobs=count(1000), seed=seed % 2**31
    ),
    "chaos-partial": lambda folder, home, count, seed: chaos.balanced(
        folder, home, "partial-execution", jobs=count(1000), seed=seed % 2**31
    ),
    "chaos-retries": lambda folder, home, count, seed: chaos.balanced(
        folder, home, "retry-storm", jobs=count(1000), seed=seed % 2**31
    ),
    "chaos-mixed": lambda folder, home, count, seed: chaos.balanced(
        folder, home, chaos.MIXED, jobs=count(500) * 2, seed=seed % 2**31
    ),
    "imported-celery": lambda folder, home, count, seed: imports.moved(
        folder, home, "celery", jobs=count(1000), kills=count(10), max_delay=60, seed=seed
    ),
    "imported-rq": lambda folder, home, count, seed: imports.moved(
        folder, home, "rq", jobs=count(1000), kills=count(10), max_delay=60, seed=seed
    ),
    "crowd": lambda folder, home, count, seed: crowds.crowd(folder, home, kills=count(50), seed=seed),
    "api-kills": lambda folder, home, count, seed: api.kills(folder, home, clients=16, kills=count(20), seed=seed),
}
ON_CARRIED: dict[str, OnStore] = {
    "delayed": lambda folder, home, count, seed: transports.delayed(
        folder, home, jobs=count(5000), rounds=3, spare=0.0, seed=seed
    ),
    "unannounced": lambda folder, home, count, seed: transports.unannounced(folder, home, kills=count(50), seed=seed),
    "emptied": lambda folder, home, count, seed: transports.emptied(
        folder, home, jobs=count(20_000), times=count(50), seed=seed
    ),
}
ON_SQLITE: dict[str, Scenario] = {
    "backups-sqlite": lambda folder, count, seed: files.killed_backups(folder, kills=count(50), seed=seed),
    "minutes-sqlite": lambda folder, count, seed: ticks.months(folder, days=count(30), seed=seed),
    "full-log-sqlite": lambda folder, *_: files.full_disk(folder, size=300_000),
    "full-file-sqlite": lambda folder, *_: files.full_disk(folder, size=6_000_000),
    "full-disk-worker-sqlite": lambda folder, *_: files.full_disk_under_a_worker(folder),
}
ON_SERVERS: dict[str, OnServer] = {
    "server-kills": lambda folder, kind, count, seed: servers.server_kills(
        folder, kind, kills=count(20), within=10.0, seed=seed
    ),
    "refused": lambda folder, kind, count, seed: networks.refused(
        folder, kind, seconds=count(60), within=10.0, busy=0.05, seed=seed
    ),
    "silent": lambda folder, kind, count, seed: networks.silent(
        folder, kind, seconds=count(30), within=10.0, busy=0.05, seed=seed
    ),
    "half-open": lambda folder, kind, count, seed: networks.half_open(
        folder, kind, times=count(5), within=15.0, seed=seed
    ),
    "cut-fan-ins": lambda folder, kind, count, seed: networks.cut_fan_ins(
        folder, kind, groups=count(100), members=100, kills=count(20), seed=seed
    ),
    "cuts": lambda folder, kind, count, seed: networks.cut(folder, kind, cuts=count(1000), seed=seed),
}
ON_POSTGRES: dict[str, Scenario] = {
    "failovers-postgres": lambda folder, count, seed: servers.failovers(folder, count=count(10), within=15.0, seed=seed)
}
ON_REDIS: dict[str, Scenario] = {
    "power-cuts-redis": lambda folder, count, seed: redis_servers.power_cuts(
        folder, cuts=count(20), within=10.0, seed=seed
    ),
    "takeovers-redis": lambda folder, count, seed: redis_servers.takeovers(
        folder, count=count(10), within=15.0, seed=seed
    ),
    "siege-redis": lambda folder, count, seed: siege.siege(folder, assaults=count(1200), within=10.0, seed=seed),
}


def _on_server(kind: Kind, scenario: OnServer) -> Scenario:
    return lambda folder, count, seed: scenario(folder, kind, count, seed)


def _outages(store: str) -> Scenario:
    return lambda folder, count, seed: api.outages(
        folder, store, clients=16, times=count(10), max_refusal=2.0, within=10.0, seed=seed
    )


def _described(store: str, examples: int) -> Scenario:
    return lambda folder, count, seed: api.described(folder, STORES[store], examples=count(examples), seed=seed)


def _history(arena: str) -> Scenario:
    return lambda folder, count, seed: history.histories(folder, arena, seconds=count(1800), seed=seed)


def _garbage(home: Home) -> Scenario:
    return lambda folder, *_: api.garbage(folder, home)


ON_WHAT_LEAVES = {f"api-outages-{store}": _outages(store) for store in api.AWAY}
DESCRIBED = {
    f"api-description-{store}": _described(store, examples)
    for store, examples in {"sqlite": 200, "postgres": 80, "redis": 200}.items()
}
GARBAGE = {f"api-garbage-{store}": _garbage(STORES[store]) for store in ("sqlite", "postgres", "redis")}


HISTORIES = {f"history-{arena}": _history(arena) for arena in ARENAS}


def _on(home: Home, scenario: OnStore) -> Scenario:
    return lambda folder, count, seed: scenario(folder, home, count, seed)


SCENARIOS: dict[str, Scenario] = {
    **{
        f"{name}-{store}": _on(STORES[store], scenario)
        for store in STORES
        if store not in OLDER
        for name, scenario in ON_EVERY_STORE.items()
    },
    **{f"{name}-{store}": _on(STORES[store], each) for store in CARRIED for name, each in ON_CARRIED.items()},
    **{f"{name}-{kind}": _on_server(KINDS[kind], each) for kind in KINDS for name, each in ON_SERVERS.items()},
    **ON_SQLITE,
    **ON_POSTGRES,
    **ON_REDIS,
    **ON_WHAT_LEAVES,
    **DESCRIBED,
    **GARBAGE,
    **HISTORIES,
    "prompt-atlasqueue": lambda folder, count, seed: examples.prompt(
        folder, jobs=count(1000), paced=count(600), seed=seed
    ),
    "killed-streams": lambda folder, count, seed: streams.killed_parts(
        folder, users=count(500), kills=count(10), seed=seed
    ),
    "history-faults": lambda folder, count, seed: history.faults_found(folder, within=count(600), seed=seed),
    "alerts": lambda folder, *_: alerts.evaluated(folder),
    "mutants": lambda _, count, seed: mutants.sampled(seconds=count(300), seed=seed),
}
"""By name, which ends in the store's if there is one."""
