"""An application for the chaos scenarios: orders of two steps, whose effects are lines of a file."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast import Context, Holdfast
from tests.crash import ledger

app = Holdfast(allow_faults=True)
LEDGER = Path(os.environ.get("CRASH_LEDGER", os.devnull))


@app.task("order")
async def order(context: Context, number: str) -> str:
    await context.step("reserve", ledger.append, LEDGER, what="reserve", job=context.id)
    await context.step("charge", ledger.append, LEDGER, what="charge", job=context.id)
    return number


def count_charges(ids: list[str]) -> dict[str, int]:
    """How often each of these orders was charged."""
    charged = [line["job"] for line in ledger.Reader(LEDGER).lines() if line["what"] == "charge"]
    return {job_id: charged.count(job_id) for job_id in ids}
