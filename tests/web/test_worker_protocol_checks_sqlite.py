"""What the checks of the conformance test ask of a worker: what the protocol says, and no words that it does not."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.core.lifecycle import Failed, decide
from holdfast.core.models import Reason
from holdfast.core.retry import Retry
from holdfast.stores.base import ClaimRequest
from holdfast.web.asgi import Api
from tools.worker_protocol.checks import Check, begun_when_lost, keeps_to_timeouts, names_its_types, outcomes_of
from tools.worker_protocol.course import Broken, Course
from tools.worker_protocol.recorder import Exchange, Recorder


class _Played(Course):
    """A course whose worker is this test."""

    is_there = True


def _tried(check: Check, folder: Path, failed: Failed) -> None:
    """Try this against a worker whose every job fails so."""

    async def trying() -> None:
        async with Holdfast(f"sqlite:///{folder}/jobs.db") as app:
            worker = asyncio.create_task(_fail(app, failed))
            await check(_Played(app, Recorder(Api(app)), "none", {}, 30))
            worker.cancel()

    asyncio.run(trying())


async def _fail(app: Holdfast, failed: Failed) -> None:
    store = await app.open_store()
    while True:
        claim = await store.queueing.claim(ClaimRequest("worker-1", {"*": 1}, limit=1, lease_for=timedelta(minutes=1)))
        await store.queueing.settle([decide(job, failed, Retry.fixed(0.01), random.Random(0)) for job in claim.jobs])
        await asyncio.sleep(0.01)


def test_a_timeout_is_known_by_its_reason_whatever_the_words(tmp_path: Path) -> None:
    _tried(keeps_to_timeouts, tmp_path, Failed(error="timed out", reason=Reason.TIMEOUT))


def test_an_error_that_only_says_timeout_is_none(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="expected reason timeout, got error"):
        _tried(keeps_to_timeouts, tmp_path, Failed(error="timeout"))


@pytest.mark.parametrize("retryable", [True, False])
def test_a_job_without_a_handler_is_known_by_its_reason(tmp_path: Path, *, retryable: bool) -> None:
    _tried(names_its_types, tmp_path, Failed(error="?", reason=Reason.NO_HANDLER, retryable=retryable))


def _settled(*tokens: str) -> Exchange:
    return Exchange("settle", 0, {"settlements": [{"token": token} for token in tokens]}, 503, {})


def _extended(**verdicts: str) -> Exchange:
    answered = {"leases": [{"verdict": verdict} for verdict in verdicts.values()]}
    return Exchange("extend", 0, {"leases": list(verdicts)}, 200, answered)


def test_settlement_sent_before_its_lease_was_lost_continues() -> None:
    given = [_extended(a="held"), _settled("a"), _extended(a="lost", b="lost"), _settled("a")]
    assert begun_when_lost(given) == set()
    assert begun_when_lost([*given, _settled("b")]) == {"b"}


def test_outcomes_are_those_of_the_named_claim() -> None:
    def claimed(token: str, job_id: str, claims: int) -> Exchange:
        return Exchange("claims", 0, {}, 200, {"jobs": [{"token": token, "id": job_id, "claims": claims}]})

    def settled(token: str, outcome: str) -> Exchange:
        return Exchange("settle", 0, {"settlements": [{"token": token, "outcome": outcome}]}, 200, {})

    given = [claimed("a", "one", 1), claimed("b", "one", 2), claimed("c", "two", 1)]
    given += [settled("a", "released"), settled("b", "succeeded"), settled("c", "failed")]
    assert outcomes_of(given, "one", 1) == {"released"}
    assert outcomes_of([*given, settled("a", "succeeded")], "one", 1) == {"released", "succeeded"}
