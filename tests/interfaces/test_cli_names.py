"""Names on the command line: misspelt ones, short ones, and summaries that fit their line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import click
import pytest

from holdfast.cli import main
from holdfast.core.lifecycle import Failed, Succeeded
from tests.interfaces.cli import JOBS, Cli


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["stauts"], "status"),
        (["lits"], "list"),
        (["wroker", "start"], "worker"),
        (["worker", "strat"], "start"),
        (["queue", "puase", "mail"], "pause"),
        (["dlq", "reply"], "replay"),
        (["config", "gte", "url"], "get"),
        (["list", "--qeue", "mail"], "--queue"),
        (["worker", "start", "--concurency", "2"], "--concurrency"),
    ],
)
def test_misspelt_word_is_answered_with_the_nearest(words: list[str], meant: str, cli: Cli) -> None:
    provided = cli.fail(*words, code=2)

    assert re.search(rf"[Dd]id you mean (one of: )?.?{meant}\b", provided.splitlines()[-1])


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["worker", "-Q", "mail"], "No such option '-Q'. To run a worker, write: holdfast worker start ..."),
        (["worker", "-l", "INFO"], "log_level in holdfast.toml. To run a worker, write: holdfast worker start ..."),
        (["worker", "start", "--loglevel=INFO"], "No such option '--loglevel'. It is a setting: HOLDFAST_LOG_LEVEL="),
        (["worker", "start", "--max-tasks-per-child", "9"], "HOLDFAST_RECYCLE_JOBS="),
        (["call", "mail.send"], "no command 'call'; to submit a job: holdfast enqueue TASK"),
        (["enqueue", "mail.send", "--eta", "2030-01-31T08:00:00Z"], "No such option '--eta'. Write --run-at INSTANT."),
        (["cancel", "x", "--terminate"], "Leave it out: a job that runs is asked to stop."),
        (["import", "celery", "-b", "redis://localhost"], "Give the URL of the broker as the argument."),
        (["control", "shutdown"], "no command 'control'; holdfast worker stop; "),
    ],
)
def test_word_of_celery_is_answered_with_ours(words: list[str], ours: str, cli: Cli) -> None:
    assert ours in cli.fail(*words, code=2).splitlines()[-1]


def _groups(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    context = click.Context(group)
    for name in group.list_commands(context):
        each = group.get_command(context, name)
        if isinstance(each, click.Group):
            yield from _groups(each, (*words, name))


@pytest.mark.parametrize("words", list(_groups(main)), ids=lambda words: " ".join(words) or "holdfast")
def test_help_summaries_fit_eighty_columns(words: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    _, commands = cli.run(*words, "--help").split("Commands:\n")

    assert [line for line in commands.splitlines() if line.endswith("...") or len(line) > 80] == []


def test_short_options_are_those_of_other_queues(cli: Cli) -> None:
    target = cli.write_jobs()
    cli.run("enqueue", "mail.send", "--arg", "to=a", "-A", target)
    cli.run("enqueue", "break", "-Q", "other")

    cli.run("worker", "start", "-A", target, "-Q", "mail", "-c", "2", "--drain")

    assert cli.json("count", "--state", "succeeded", "-Q", "mail") == {"count": 1}
    assert cli.json("count", "--state", "queued", "-Q", "other") == {"count": 1}


def test_count_is_exact_and_takes_the_filters_of_list(cli: Cli) -> None:
    mail = [cli.run("enqueue", "mail.send", "--queue", "mail", "--tag", "new").strip() for _ in range(3)]
    cli.run("enqueue", "report.build")
    dead = cli.dead()
    cli.run("cancel", mail[0])

    for filters in (
        [],
        ["--queue", "mail"],
        ["--task", "mail.send", "--task", "work"],
        ["--tag", "new", "--state", "queued"],
        ["--state", "dead", "--error", "broke"],
        ["--reason", "non_retryable"],
        ["--worker", "worker-1"],
        ["--since", "1h", "--until", "2030-01-01T00:00:00Z"],
        ["--queue", "none"],
    ):
        listed = [job["id"] for job in cli.json("list", *filters)["jobs"]]
        assert cli.run("count", *filters) == f"{len(listed)}\n"
        assert cli.json("count", *filters) == {"count": len(listed)}
    assert cli.json("count", "--state", "dead") == {"count": len([dead])}
    assert "queue: 'No'" in cli.fail("count", "--queue", "No", code=2)


def _story(cli: Cli, job_id: str) -> list[str]:
    """Attempts and replays as ``show`` prints them."""
    text = cli.run("show", job_id)
    return re.findall(r"^  (attempt \d+|replayed)", text, re.MULTILINE)


def test_show_marks_replays_between_attempts(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work", "--max-attempts", "2").strip()
    cli.end(job_id, Failed(error="it broke", delay=timedelta(hours=1)))
    cli.run("replay", job_id)
    assert _story(cli, job_id) == ["attempt 1", "replayed"]

    cli.end(job_id, Failed(error="it broke", retryable=False))
    assert _story(cli, job_id) == ["attempt 1", "replayed", "attempt 1"]

    cli.run("replay", job_id)
    assert _story(cli, job_id) == ["attempt 1", "replayed", "attempt 1", "replayed"]
    cli.end(job_id, Succeeded(result="1"))
    assert _story(cli, job_id) == ["attempt 1", "replayed", "attempt 1", "replayed"]


def test_show_marks_no_replay_where_there_was_none(cli: Cli) -> None:
    job_id = cli.run("enqueue", "work", "--max-attempts", "3").strip()
    assert _story(cli, job_id) == []
    cli.end(job_id, Failed(error="it broke", delay=timedelta(hours=1)))
    assert _story(cli, job_id) == ["attempt 1"]
    dead = cli.dead()
    assert _story(cli, dead) == ["attempt 1"]


@pytest.mark.parametrize("given", [True, False])
def test_url_from_argument_is_named_only_if_given(
    given: bool, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/mine.db"
    target = cli.write_jobs(JOBS.replace("Holdfast()", f'Holdfast("{url}")'))
    source = "argument" if given else f"the code of {target}"
    words = ["--app", target, *(["--url", url] if given else [])]

    assert f"(url from {source})" in cli.fail("status", *words, code=1)
    if not given:
        monkeypatch.setenv("HOLDFAST_APP", target)
        words = []
    assert cli.invoke("enqueue", "break", *words).stderr == f"made a new database: {url} (url from {source})\n"
