"""Encrypted jobs on the command line, with the key and without, and the counts of keys."""

from __future__ import annotations

import pytest

from holdfast.core.lifecycle import Succeeded
from tests.interfaces.cli import Cli

JOBS = """
import os
from holdfast import Holdfast
from holdfast.integrations.cryptography import AesGcmCodec

app = Holdfast(codec=AesGcmCodec.from_text(os.environ["JOBS_KEYS"]))

@app.task("work")
def work(to: str) -> str:
    return f"sent to {to}"
"""


def test_jobs_are_shown_by_who_has_the_key_and_keys_are_counted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (cli.run("encryption", "new-key").strip() for _ in range(2))
    monkeypatch.setenv("JOBS_KEYS", f"2030-01:{old}")
    app = ("--app", cli.write_jobs(JOBS))
    job_id = cli.run("enqueue", "work", '{"to": "persimmon"}', *app).strip()
    assert '"to": "persimmon"' in cli.run("show", job_id, *app)
    without = [cli.run(*words) for words in (("show", job_id), ("list",), ("why", job_id), ("show", job_id, "--tree"))]
    assert "[encrypted with key 2030-01]" in without[0]
    assert not any("persimmon" in each for each in without)
    assert cli.json("show", job_id)["payload"]["$encrypted"]["key"] == "2030-01"
    assert "decrypt" in cli.fail("edit", job_id, "--payload", '{"to": "b"}', code=1)

    monkeypatch.setenv("JOBS_KEYS", f"2030-02:{new},2030-01:{old}")
    rotated = ("--app", cli.write_jobs(JOBS))
    other_id = cli.run("enqueue", "work", '{"to": "b"}', *rotated).strip()
    assert '"to": "persimmon"' in cli.run("show", job_id, *rotated)
    assert cli.json("encryption", "keys")["keys"] == [
        {"key_id": "2030-01", "jobs": 1, "dead": 0, "schedules": 0, "signals": 0},
        {"key_id": "2030-02", "jobs": 1, "dead": 0, "schedules": 0, "signals": 0},
    ]
    for each in (job_id, other_id):
        cli.end(each, Succeeded())
    assert cli.run("encryption", "keys") == "nothing is stored that may still run\n"
