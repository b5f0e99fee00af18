"""Alerts that the API sends, where no worker could."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.receiver import Receiver
from tests.web.serving import Served


def test_store_that_is_away_is_reported_and_the_api_goes_on(tmp_path: Path) -> None:
    settings = {"alerts": json.dumps({"dead": {"dead_over": 0}}), "alert_every": "1s"}
    with Served(tmp_path, "redis://127.0.0.1:1/0", **settings) as served, served.client() as client:
        line = served.line("store_trouble")
        assert (line["service"], line["error"].partition(":")[0]) == ("api", "alerts")
        assert client.get("/health").status_code == 200


@pytest.mark.rows("Q79")
def test_api_sends_that_no_worker_serves_a_queue(home: str, tmp_path: Path) -> None:
    receiver = Receiver()
    rules = json.dumps({"unserved": {"unserved_over": "100ms"}})
    settings = {"alerts": rules, "alert_webhook": receiver.url, "alert_every": "1s"}
    try:
        with (
            Served(tmp_path, home, **settings) as served,
            Served(tmp_path, home, **settings),
            served.client() as client,
        ):
            answer = client.post("/v1/jobs", json={"task": "work", "queue": "mail", "payload": {}})
            assert answer.status_code in (200, 201), answer.text
            assert receiver.arrived.wait(30)
            assert receiver.messages[0]["text"].startswith("no worker serves queue mail: its oldest ready job has wait")
            job = answer.json()["id"]
            receiver.arrived.clear()
            assert client.post(f"/v1/jobs/{job}/cancel").status_code == 200
            assert receiver.arrived.wait(30)
        assert receiver.states() == ["firing", "cleared"]
    finally:
        receiver.close()
