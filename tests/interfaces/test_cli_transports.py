"""What commands say of a transport."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.core.workers import WorkerHeartbeat
from tests.interfaces.cli import JOBS, Cli
from tests.support.redis import Redis


@pytest.fixture
def server() -> Iterator[Redis]:
    """A Redis to be stopped."""
    with Redis() as server:
        yield server


@pytest.fixture
def carried(cli: Cli, postgres_url: str, server: Redis) -> Cli:
    """Commands in a directory whose settings name a transport."""
    (cli.folder / "holdfast.toml").write_text(
        f'url = "{postgres_url}"\ntransport = "redis_list"\ntransport_url = "{server.url()}"\n'
        f'transport_key = "shop:jobs"\ntransport_dead_key = "shop:dead"\napp = "{cli.write_jobs()}"\n'
    )
    cli.run("migrate")
    return cli


def test_queues_show_what_waits_in_the_transport(carried: Cli, server: Redis) -> None:
    ids = [carried.run("enqueue", "work").strip() for _ in range(3)]
    server.execute("RPOP", "shop:jobs")
    assert [each.decode() for each in server.execute("LRANGE", "shop:jobs", 0, -1)] == [ids[2], ids[1]]

    (queue,) = carried.json("queue", "list")["queues"]
    assert (queue["states"]["queued"], queue["announced"]) == (3, 2)
    assert carried.run("queue", "list").split()[-1] == "2"

    server.stop()
    assert carried.json("queue", "list")["queues"][0]["announced"] is None
    assert "ANNOUNCED" not in carried.run("queue", "list")


def transport(cli: Cli) -> str:
    """What the doctor says of it."""
    found = cli.invoke("doctor").stdout.splitlines()
    (line,) = [line for line in found if ("transport" in line and "ids for" in line) or "cannot be reached" in line]
    return line


def test_the_doctor_knows_the_transport(carried: Cli, server: Redis) -> None:
    carried.run("enqueue", "work")
    assert "holds 1 ids for 1 ready jobs" in transport(carried)

    server.stop()
    assert f"Redis at 127.0.0.1:{server.port} cannot be reached" in transport(carried)


def test_settings_name_the_transport_of_a_store_in_code(cli: Cli, postgres_url: str, server: Redis) -> None:
    app = cli.write_jobs(JOBS.replace("Holdfast()", f"Holdfast({postgres_url!r})"))
    cli.run("config", "set", "app", app)
    problem = cli.fail("config", "set", "transport", "redis_list", code=78)
    assert problem.startswith("holdfast: the file was left as it is; with this value: holdfast.toml:")
    cli.run("config", "set", "transport_url", server.url())
    cli.run("config", "set", "transport", "redis_list")
    cli.run("migrate")

    cli.run("enqueue", "work")

    assert "holds 1 ids for 1 ready jobs" in transport(cli)


def test_why_reports_an_unavailable_transport(carried: Cli, server: Redis) -> None:
    job_id = carried.run("enqueue", "work").strip()
    app = Holdfast()

    async def beat() -> None:
        heartbeat = WorkerHeartbeat(worker="w", host="elsewhere", pid=1, queues="*", concurrency=1)
        await (await app.open_store()).queueing.heartbeat(heartbeat, [], lease_for=timedelta(minutes=5))

    app.run_blocking(beat())
    app.sync.close()
    assert "transport_away" not in codes(carried, job_id)

    server.stop()

    assert "transport_away" in codes(carried, job_id)


def codes(cli: Cli, job_id: str) -> list[str]:
    """The reasons that ``why`` gives."""
    return [each["code"] for each in cli.json("why", job_id)["reasons"]]


ON_POSTGRES = 'url = "postgresql://db/x"\ntransport = "redis_list"\n'


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            'transport = "redis_list"\ntransport_url = "redis://localhost/0"',
            "transport: redis_list needs a PostgreSQL; set url",
        ),
        (
            'url = "sqlite:///a.db"\ntransport = "redis_list"\ntransport_url = "redis://localhost/0"',
            "transport: redis_list carries the ids of jobs that PostgreSQL holds; url names another store",
        ),
        (
            'url = "redis://localhost/0"\ntransport = "redis_stream"\ntransport_url = "redis://localhost/0"',
            "set transport to none, or url to postgresql://",
        ),
        (
            'url = "postgresql://db/x"\ntransport = "redis_list"',
            "transport: redis_list needs transport_url; set that first, such as redis://",
        ),
        (ON_POSTGRES + 'transport_url = "postgresql://db/x"', "transport_url: name a Redis or Valkey"),
        (
            ON_POSTGRES + 'transport_url = "redis://h"\ntransport_key = "{holdfast:transport}:dead"',
            "transport_dead_key: it is transport_key too",
        ),
        ('transport = "rabbit"', "write one of none, redis_list, redis_stream"),
        ('transport_key = "a b"', "give 1 to 100 visible ASCII characters"),
        (ON_POSTGRES + 'transport_url = "redis+cluster://h"\ntransport_key = "a"', "must have the same {tag}"),
        (ON_POSTGRES + 'transport_url = "redis://h/0?namespace=x"', "transport_url: namespace is no parameter"),
    ],
)
def test_a_transport_that_cannot_be_is_refused(cli: Cli, tmp_path: Path, lines: str, problem: str) -> None:
    (tmp_path / "holdfast.toml").write_text(lines)

    assert problem in cli.fail("status", code=78)
