"""A Django project on a SQLite file, in a process of its own: Django is set up once a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.programs import ROOT, Program, environment
from tests.support.servers import PATIENCE, until

PROJECT = """
import asyncio, io, os, sqlite3, sys, threading
from contextlib import closing, redirect_stdout
from pathlib import Path

import django
from asgiref.sync import sync_to_async
from django.conf import settings

test_database = Path(sys.argv[1]).with_name("test.sqlite3")
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1], "TEST": {"NAME": test_database}}
apps = ["holdfast.integrations.django", "django.contrib.contenttypes"]
settings.configure(INSTALLED_APPS=apps, DATABASES={"default": database}, HOLDFAST={"COMMANDS": "argv"})
django.setup()

from django.contrib.contenttypes.models import ContentType
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import override_settings
from django.utils.module_loading import import_string

from holdfast.core.errors import ConfigError
from holdfast.integrations.django import app, task
from holdfast.integrations.django.database import find_place
from holdfast.stores.sqlite.connection import WAL_RESET_FIXED_VERSION


@task("note")
def note(number: int) -> int:
    return number


def refusal_of(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def refuses(kind, call):
    try:
        call()
    except kind:
        return True
    return False


def fail_in_transaction():
    with transaction.atomic():
        note.sync.enqueue(1)
        app.sync.run_command("true")
        raise ZeroDivisionError


def enqueue_without_tables():
    with transaction.atomic():
        connection.cursor().execute("create table theirs (number)")
        note.sync.enqueue(1)


assert "manage.py migrate" in refusal_of(ConfigError, enqueue_without_tables)
call_command("migrate", verbosity=0)
assert "holdfast_job" in connection.introspection.table_names()
with transaction.atomic():
    handle = note.sync.enqueue(1)
    with transaction.atomic():
        note.sync.enqueue(2)
        transaction.set_rollback(True)
    assert app.sync.count() == 0
assert [job.id for job in app.sync.find().jobs] == [handle.id]
assert refuses(ZeroDivisionError, fail_in_transaction)
connection.set_autocommit(False)
note.sync.enqueue(3)
connection.rollback()
connection.set_autocommit(True)
assert app.sync.count() == 1

(pages,) = connection.cursor().execute("pragma wal_autocheckpoint").fetchone()
assert (pages == 0) == (sqlite3.sqlite_version_info < WAL_RESET_FIXED_VERSION)

with redirect_stdout(io.StringIO()) as listed:
    call_command("holdfast", "list", "--json")
assert handle.id in listed.getvalue()
assert refuses(CommandError, lambda: call_command("holdfast", "show", "key:none"))

with redirect_stdout(io.StringIO()) as explained:
    call_command("holdfast", "why", handle.id)
    call_command("holdfast", "status")
    call_command("holdfast", "doctor")
assert explained.getvalue().count("python manage.py holdfast worker start") >= 2, explained.getvalue()
assert app.events.program == "python manage.py holdfast"  # in log lines

connection.close()
connection.settings_dict["AUTOCOMMIT"] = False
call_command("migrate", verbosity=0)  # writes nothing
ContentType.objects.create(app_label="left", model="open")
assert "AUTOCOMMIT True" in refusal_of(CommandError, lambda: call_command("migrate", verbosity=0))
connection.rollback()
connection.close()
connection.settings_dict["AUTOCOMMIT"] = True



async def submit_in_a_loop():
    return await note.enqueue(1)


# What the page says of an event loop of one's own: it knows nothing of the transaction.
with transaction.atomic():
    unnoticed = asyncio.run(submit_in_a_loop())
    transaction.set_rollback(True)
assert app.sync.get(unnoticed.id).state == "queued"

call_command("flush", interactive=False, verbosity=0)
assert app.sync.count() == 0

assert [each.id for each in run_checks() if each.id.startswith("holdfast")] == ["holdfast.W001"]
connection.settings_dict["OPTIONS"]["transaction_mode"] = "IMMEDIATE"
assert not [each for each in run_checks() if each.id.startswith("holdfast")]
with override_settings(HOLDFAST_CONCURRENCY=5):
    assert [each.hint for each in run_checks() if each.id == "holdfast.W002"] == ['HOLDFAST = {"CONCURRENCY": …}']

# Any spelling of the path names the file of the project; another file is no part of its transactions.
settings_derived, folder = app.settings, Path(sys.argv[1]).parent
os.chdir(folder)
app.derives_url = False
for spelling in ("project.sqlite3", f"{folder}/../{folder.name}/project.sqlite3"):
    app.settings = settings_derived.replace_values(url=f"sqlite:///{spelling}")
    assert refuses(ZeroDivisionError, fail_in_transaction)
    with transaction.atomic():
        note.sync.enqueue(1)
        assert connection.cursor().execute("select count(*) from holdfast_job").fetchone() == (1,)
        transaction.set_rollback(True)
    assert not [each for each in run_checks() if each.id == "holdfast.W003"]
for url, warnings in (("sqlite:///other.sqlite3", 1), ("redis://127.0.0.1:1", 0)):
    app.settings = settings_derived.replace_values(url=url)
    assert len([each for each in run_checks() if each.id == "holdfast.W003"]) == warnings, url
app.settings, app.derives_url = settings_derived, True

for urls, are_same in (
    (("postgres://ann@Db/shop?schema=jobs", "postgresql://bob:p@db:5432/shop?sslmode=require"), True),
    (("postgresql:///shop?host=/a", "postgresql://%2Fa/shop?port=5432"), True),
    (("postgresql://[::1]/shop", "postgresql://[::1]:5432/shop"), True),
    (("postgresql://a,b/shop", "postgresql://a:5432,b:5432/shop"), True),
    (("postgresql:///shop?host=/a", "postgresql:///shop?host=/b"), False),
    (("postgresql:///shop?port=5433", "postgresql:///shop"), False),
    (("postgresql://db/shop", "postgresql://db/test_shop"), False),
    (("postgresql://db/shop", "postgresql://db:6432/shop"), False),
):
    assert (find_place(urls[0]) == find_place(urls[1])) == are_same, urls


def nested():
    pass


nested.__qualname__ = "somewhere.nested"
settings_given, app.settings = app.settings, app.settings.replace_values(url="mysql://here/shop")
app.task("nested", executor="process")(nested)
(wrong_url, wrong_task) = [each for each in run_checks() if each.id.startswith("holdfast.E")]
assert "scheme 'mysql' is not known" in wrong_url.msg and "top level of a module" in wrong_task.msg
app.settings = settings_given

refused = refusal_of(ImportError, lambda: import_string("holdfast.integrations.django.db_task"))
assert "cannot import name 'db_task'" in refused and "@app.task()" in refused

# Clones for parallel tests have what was written after the tables of Holdfast, and nothing of earlier clones.
clone, log = test_database.with_name("test_1.sqlite3"), test_database.with_name("test_1.sqlite3-wal")
log.write_bytes(b"of an earlier run")
connection.creation.create_test_db(verbosity=0, serialize=False)
assert not log.exists()
connection.creation.clone_test_db("1", verbosity=0)
with closing(sqlite3.connect(clone)) as reader:
    (count,) = reader.execute("select count(*) from django_content_type").fetchone()
assert count == ContentType.objects.count() == 2
note.sync.enqueue(1)
assert app.sync.count() == 1

# A call that hangs in asgiref's thread keeps no worker from its end.
import holdfast.integrations.django.worker
loop, started = asyncio.new_event_loop(), threading.Event()
hanging = loop.create_task(sync_to_async(lambda: (started.set(), threading.Event().wait()))())
loop.run_until_complete(asyncio.to_thread(started.wait))
"""


def test_jobs_share_the_file_of_a_project(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROJECT, str(tmp_path / "project.sqlite3")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


MANAGE = """
import os, sys
from django.core.management import execute_from_command_line

os.environ["DJANGO_SETTINGS_MODULE"] = "project_settings"
execute_from_command_line(sys.argv)
"""
SETTINGS = """
import os
from pathlib import Path
import beside

print("PYTHONPATH", os.environ["PYTHONPATH"], flush=True)

SECRET_KEY = "-"
INSTALLED_APPS = ["holdfast.integrations.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(__file__).with_name("db.sqlite3")}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder of a project whose settings import a module of the folder ``extra`` beside it."""
    folder, extra = tmp_path / "project", tmp_path / "extra"
    for each, name, source in (
        (folder, "manage.py", MANAGE),
        (folder, "project_settings.py", SETTINGS),
        (extra, "beside.py", ""),
    ):
        each.mkdir(exist_ok=True)
        (each / name).write_text(source)
    return folder


def test_dev_starts_anew_as_often_as_the_code_changes(project: Path) -> None:
    variables = environment(project, ("DJANGO",), PYTHONPATH=os.pathsep.join([str(ROOT), "../extra"]))
    with Program(["manage", "holdfast", "dev", "--no-api"], project, variables) as program:
        program.says("worker_started")
        for number in (2, 3):
            (project / "tasks.py").write_text("#" * number)
            until(lambda: program.log().count("worker_started") == number, f"start {number}")  # noqa: B023
    paths = [line for line in program.log().splitlines() if line.startswith("PYTHONPATH")]
    assert paths[1] == paths[2], "the path grows with each start"


def test_worker_processes_find_the_project_and_the_path_that_is_given(project: Path) -> None:
    variables = environment(project, ("DJANGO",), PYTHONPATH=str(ROOT))
    words = ["holdfast", "worker", "start", "--processes", "2", "--drain", "--pythonpath"]
    command = [sys.executable, str(project / "manage.py"), *words, str(project.with_name("extra"))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=variables, cwd=os.sep
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"worker_started"') == 2
