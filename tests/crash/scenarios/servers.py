"""kill -9 of the database server under load: it comes back, or its standby takes over."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from pathlib import Path

from tests.crash.report import Report
from tests.crash.scenarios.kinds import Kind
from tests.crash.scenarios.load import Load
from tests.support import postgres
from tests.support.postgres import Postgres

DOWN = 3.0  # seconds at most until the server is started again, or its standby promoted


def server_kills(folder: Path, kind: Kind, *, kills: int, within: float, seed: int) -> Report:
    """The server is killed and started again; every process goes on within so many seconds."""
    rng = random.Random(seed)
    with kind.start() as server, Load(folder, lambda _: nullcontext(kind.url(server))) as load:
        for _ in range(kills):
            time.sleep(rng.uniform(0.2, 1.0))
            gone = time.monotonic()
            server.kill()
            time.sleep(rng.uniform(0.0, DOWN))
            server.start()
            load.resumed(gone, time.monotonic(), within=within)
        load.report.figures |= {"seed": seed, "kills": kills}
        return load.judged()


def failovers(folder: Path, *, count: int, within: float, seed: int) -> Report:
    """The primary is killed and its synchronous standby promoted; what was the primary becomes the standby.

    Every process goes on within so many seconds, through a URL that names both."""
    rng = random.Random(seed)
    with Postgres(authenticated=True) as first, first.standby() as second:
        primary, standby = first, second
        url = postgres.url(first, second, schema="crash")
        with Load(folder, lambda _: nullcontext(url)) as load:
            for _ in range(count):
                time.sleep(rng.uniform(0.2, 1.0))
                gone = time.monotonic()
                primary.kill()
                time.sleep(rng.uniform(0.0, DOWN))
                standby.promote()
                load.resumed(gone, time.monotonic(), within=within)
                primary.follow(standby)
                primary, standby = standby, primary
            load.report.figures |= {"seed": seed, "failovers": count}
            return load.judged()
