"""Django projects on PostgreSQL: the example shop, with real workers and a database whose connections are cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast, JobState
from holdfast.core.models import JobFilter
from tests.examples.programs import ROOT, Program, environment
from tests.support.postgres import USER, Postgres
from tests.support.servers import until

SHOP = ROOT / "examples" / "shop"


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A server that the tests of this module restart."""
    with Postgres(durable=False) as server:
        server.execute(f"alter role {USER} createdb")  # test runners make databases
        yield server


@pytest.fixture(scope="module")
def variables(server: Postgres) -> dict[str, str]:
    """The environment of the shop, on a database of its own that it has migrated."""
    place = {"PGDATABASE": server.create_database(), "PGHOST": "127.0.0.1", "PGPORT": str(server.port)}
    mail = "django.core.mail.backends.dummy.EmailBackend"
    shop = {"PGUSER": USER, "DJANGO_SETTINGS_MODULE": "shop.settings", "EMAIL_BACKEND": mail}
    variables = environment(SHOP, ("DJANGO", "PG"), **place, **shop)
    assert "Applying holdfast: 0001_initial" in manage(variables, "migrate")
    return variables


def manage(variables: dict[str, str], *words: str, code: int = 0) -> str:
    """The output of ``manage.py`` with these words, called from another directory than the project's."""
    command = [sys.executable, str(SHOP / "manage.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=os.sep)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def jobs(server: Postgres, variables: dict[str, str]) -> Iterator[Holdfast]:
    """The jobs of the shop, for the test's own eyes."""
    app = Holdfast(server.url(variables["PGDATABASE"]))
    yield app
    app.sync.close()


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_tests_of_the_shop_pass(variables: dict[str, str], store: str) -> None:
    if store == "postgres":
        assert "OK" in manage(variables, "test", "orders", "--noinput")
    else:  # in memory
        plain = {name: value for name, value in variables.items() if not name.startswith("PG")}
        assert "OK" in manage(plain, "test", "orders", "tests.integrations.django_cases", "--parallel", "2")


def test_settings_name_a_transport_for_the_database(variables: dict[str, str]) -> None:
    named = {"HOLDFAST_TRANSPORT": "redis_list", "HOLDFAST_TRANSPORT_URL": "redis://127.0.0.1:1/0"}

    assert "postgresql://" in manage(variables | named, "holdfast", "status")


def test_jobs_survive_a_restart_of_their_database(
    server: Postgres, variables: dict[str, str], jobs: Holdfast, tmp_path: Path
) -> None:
    """Handlers of every kind keep their connections for a minute, and each disturbance breaks all of them."""
    database = variables["PGDATABASE"]
    insert = "insert into orders_order (email, confirmed, mails) values ('a@b.c', false, 0) returning id"
    ((order,),) = server.execute(insert, database=database)
    payloads = {
        "confirm": {"order_id": order},
        "count_orders": {},
        "list_addresses": {},
        "send_issue": {"args": [1], "kwargs": {}},
    }
    load = [(f"orders.tasks.{name}", payload) for name, payload in payloads.items()] * 20

    def restart() -> None:
        server.stop()
        server.start()

    def cut() -> None:
        ours = "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and application_name = ''"
        assert server.execute(ours, database)

    with Program(["manage", "holdfast", "worker", "start", "--processes", "2"], tmp_path, variables) as program:
        for number, disturb in enumerate((cut, restart, None), 1):
            jobs.sync.enqueue_many([jobs.draft_job(task, payload) for task, payload in load])
            until(lambda: count(jobs, JobState.SUCCEEDED) > len(load) * (number - 1), "some of the jobs")  # noqa: B023
            if disturb is not None:
                disturb()
            until(lambda: count(jobs, JobState.SUCCEEDED, JobState.DEAD) == len(load) * number, "all jobs")  # noqa: B023
        assert not program.events("child_ended")
    assert not count(jobs, JobState.DEAD)


def count(jobs: Holdfast, *states: JobState) -> int:
    return jobs.sync.count(JobFilter(states=states))
