"""The times that the documents of AtlasQueue promise: percentiles of many jobs, and a rate over half a minute."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from tests.crash.report import Report
from tests.examples.atlasqueue_support import EXAMPLE, Atlasqueue
from tests.support.load import percentile
from tests.support.postgres import FLOOR, Postgres
from tests.support.redis import Redis

TAKEN = "select extract(epoch from updated_at - created_at)::float from jobs where type = 'noop'"
FIRST = "select min(extract(epoch from started_at))::float from holdfast.jobs where task = 'test.paced'"


def prompt(folder: Path, *, jobs: int, paced: int, seed: int) -> Report:
    """So many jobs one after another: 95 % succeed within a second (A101). So many of a type that is limited to 20 a
    second, over two workers: the rate holds within a tenth (A50)."""
    sys.path.insert(0, str(EXAMPLE))
    report = Report(figures={"seed": seed, "jobs": jobs, "paced": paced})
    with Postgres(FLOOR) as postgres, Redis() as redis, closing(Atlasqueue(postgres, redis, folder)) as queue:
        with queue.workers(2, WORKER_POLL_TIMEOUT="5"):
            for _ in range(jobs):
                queue.all_ended([queue.submit()])
            handles = [queue.post("test.paced") for _ in range(paced + 1)]
            began = sorted(handle.sync.result(timeout=paced) for handle in handles)
        p95 = percentile([seconds for (seconds,) in queue.sql(TAKEN)], 0.95)
        first = queue.value(FIRST)
    report.expect(p95 <= 1.0, f"1 in 20 jobs took more than {p95:.3f} s")
    quickest = max(number / (instant - first) for number, instant in enumerate(began[20:], 20))
    report.expect(quickest <= 22, f"at one instant {quickest:.1f} a second had begun")
    rate = paced / (began[-1] - began[0])
    report.expect(rate >= 18, f"only {rate:.1f} a second began")
    report.figures |= {"p95 ms": round(1000 * p95, 1), "rate": round(rate, 2)}
    return report
