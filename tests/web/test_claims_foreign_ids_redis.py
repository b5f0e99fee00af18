"""Jobs pushed into Redis by hand are claimed and settled over HTTP like others, whatever their ids."""

from __future__ import annotations

import pytest

from tests.support.keys import Keys
from tests.web.client import Api
from tests.web.working import Worker

IDS = ("01ARZ3NDEKTSV4RRFFQ69G5FAV", "invoice-7", "ünser job", "018f0f5e-7c7a-7000-8000-000000000001")


@pytest.mark.parametrize("ulids", [False, True])
def test_job_with_a_foreign_id_runs_to_its_end(home: str, ulids: bool) -> None:
    keys = Keys(home)
    with Api(home + "&ids=ulid" if ulids else home) as api:
        worker = Worker(api)
        ours = api.submit()
        for each in IDS:
            keys.hset(f"job:{each}", mapping={"payload": '{"by":"hand"}', "task": "work"})
            keys.rpush("ready", each)
        keys.rpush("ready", "nobody")

        jobs = worker.claim()

        assert len(jobs) == len(IDS) + 1
        assert set(worker.verdicts(*jobs)) == {"held"}
        assert {worker.settle(job, "succeeded") for job in jobs} == {("accepted", "succeeded")}
        assert api.get(f"/v1/jobs/{ours['id']}")["state"] == "succeeded"
        assert {keys.hget(f"job:{each}", "state") for each in IDS} == {"succeeded"}
    keys.client.close()
