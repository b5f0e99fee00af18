"""The jobs of a tag: progress, counts and errors on the command line."""

from __future__ import annotations

import re

from holdfast.core.lifecycle import Failed, Succeeded
from tests.interfaces.cli import Cli

TAG = "run 7/ü%'[bold]"


def _submit(cli: Cli, number: int) -> list[str]:
    return [cli.run("enqueue", "work", "--tag", TAG).strip() for _ in range(number)]


def test_watch_of_a_tag_ends_with_its_last_job(cli: Cli) -> None:
    first, second = _submit(cli, 2)
    cli.end(first, Succeeded())
    line = cli.run("watch", "--tag", TAG, "--for", "1ms", code=75)
    assert re.fullmatch(r".*  1 of 2 ended \(50 %\)\n", line)
    assert line.startswith(TAG)
    cli.run("cancel", "--tag", TAG)
    report = cli.json("watch", "--tag", TAG, code=1)
    assert (report["total"], report["ended"], report["seconds_left"]) == (2, 2, 0)
    assert (report["states"]["succeeded"], report["states"]["cancelled"]) == (1, 1)
    cli.run("delete", second)
    assert "1 of 1 ended (100 %)" in cli.run("watch", "--tag", TAG)
    assert "no job has the tag 'run 8'" in cli.invoke("watch", "--tag", "run 8").stderr
    cli.run("watch", first, "--tag", TAG, code=2)


def test_count_by_state_and_errors_of_a_tag(cli: Cli) -> None:
    ids = _submit(cli, 4)
    cli.dead()  # of no tag
    for job_id, error in zip(ids, ("file 1 is empty", "file 22 is empty", "disk full"), strict=False):
        cli.end(job_id, Failed(error=error, retryable=False))

    counted = cli.json("count", "--tag", TAG, "--by-state")
    assert counted["count"] == 4
    assert {name: number for name, number in counted["states"].items() if number} == {"dead": 3, "queued": 1}
    assert cli.run("count", "--tag", TAG, "--by-state").split() == ["queued", "1", "dead", "3", "in", "all", "4"]

    listed = cli.json("list", "--tag", TAG, "--group-by", "error")
    assert [(group["dead"], group["latest_job"]) for group in listed["groups"]] == [(1, ids[2]), (2, ids[1])]
    empty = listed["groups"][1]["id"]
    assert empty in cli.run("list", "--tag", TAG, "--group-by", "error")
    cli.run("replay", "--tag", TAG, "--error-group", empty)
    assert cli.json("count", "--tag", TAG, "--by-state")["states"]["queued"] == 3
    assert cli.json("list", "--tag", TAG, "--group-by", "error")["total"] == 1
    cli.run("list", "--group-by", "error", "--state", "queued", code=2)
