"""A Django project with several databases: jobs wait for the transaction in which they were enqueued."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.redis import shared
from tests.support.servers import PATIENCE

PROJECT = """
import json, sys, unittest

import django
from django.conf import settings

folder, url = sys.argv[1:]
names = ("default", "other", "third")
databases = {
    name: {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{folder}/{name}.sqlite3"} for name in names
}
apps = ["holdfast.integrations.django", "django.contrib.contenttypes"]
settings.configure(INSTALLED_APPS=apps, DATABASES=databases, HOLDFAST={"URL": url} if url else {})
django.setup()

from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.db import transaction
from django.test import TestCase

from holdfast import testing
from holdfast.core.errors import Conflict
from holdfast.integrations.django import app, task


@task("note")
def note(number: int) -> int:
    return number


for name in names:
    call_command("migrate", database=name, verbosity=0)


def numbers():
    return {json.loads(job.payload)["number"] for job in app.sync.find().jobs}


class Broken(Exception):
    pass


class Plain(unittest.TestCase):
    def test_jobs_wait_for_the_transaction_of_another_database(self):
        with self.assertRaises(Broken), transaction.atomic(using="other"):
            ContentType.objects.using("other").create(app_label="shop", model="order")
            note.sync.enqueue(1)
            raise Broken
        with transaction.atomic(using="other"):
            note.sync.enqueue(2)
            with self.assertRaises(Broken), transaction.atomic(using="other"):
                note.sync.enqueue(3)
                raise Broken
            self.assertEqual(numbers() & {1, 2, 3}, set())
        self.assertEqual(numbers() & {1, 2, 3}, {2})

    def test_block_of_the_own_database_is_first(self):
        with self.assertRaises(Broken), transaction.atomic(using="other"), transaction.atomic():
            note.sync.enqueue(4)
            raise Broken
        with transaction.atomic(), transaction.atomic(using="other"), transaction.atomic(using="third"):
            note.sync.enqueue(5)
        self.assertEqual(numbers() & {4, 5}, {5})

    def test_blocks_of_two_other_databases_are_refused(self):
        with transaction.atomic(using="other"), transaction.atomic(using="third"):
            with self.assertRaisesRegex(Conflict, "transactions of other and third are open.*DATABASE"):
                note.sync.enqueue(6)
        self.assertNotIn(6, numbers())


class OfDjango(TestCase):
    databases = set(names)

    def test_blocks_of_the_test_are_none_of_the_code(self):
        with testing.manual(app):
            with self.captureOnCommitCallbacks(execute=True):
                note.sync.enqueue(8)
            testing.assert_enqueued(app, task="note", count=1)
            with self.captureOnCommitCallbacks(using="other", execute=True), transaction.atomic(using="other"):
                note.sync.enqueue(9)
            testing.assert_enqueued(app, task="note", count=2)
            with self.captureOnCommitCallbacks(using="other", execute=True), self.assertRaises(Broken):
                with transaction.atomic(using="other"):
                    note.sync.enqueue(10)
                    raise Broken
            testing.assert_enqueued(app, task="note", count=2)


unittest.main(argv=["-"])
"""


def run_tests(folder: Path, url: str) -> None:
    """Runs the tests of the project; an empty URL: the database of the alias ``default`` holds the jobs."""
    command = [sys.executable, "-c", PROJECT, str(folder), url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_jobs_in_a_database_wait_for_the_transaction_of_another(tmp_path: Path) -> None:
    run_tests(tmp_path, "")


def test_jobs_in_redis_wait_for_the_transaction_of_any_database(tmp_path: Path) -> None:
    with shared().fresh_namespace() as namespace:
        run_tests(tmp_path, shared().url(namespace=namespace))
