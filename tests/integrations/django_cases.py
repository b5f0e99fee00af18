"""Tests inside a Django project, the example shop: ``manage.py test tests.integrations.django_cases``."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from io import StringIO
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase, override_settings
from django.test.testcases import DatabaseOperationForbidden
from django.utils import timezone

from holdfast import Context, Snooze, testing
from holdfast.core.errors import HoldfastError, Invalid, NotFound
from holdfast.integrations.django import app, task
from holdfast.integrations.django.application import DjangoHoldfast
from holdfast.integrations.django.backend import TaskResultDoesNotExist, UnsupportedResult
from holdfast.integrations.django.backend import task_enqueued as enqueued
from holdfast.integrations.django.backend import task_finished as finished
from holdfast.integrations.django.backend import task_started as started
from holdfast.integrations.django.database import _postgres_url
from holdfast.integrations.django.management.commands.holdfast import without_django_options
from holdfast.integrations.django.models import Job

if django.VERSION >= (6,):
    from django.tasks import TaskContext, TaskResultStatus
    from django.tasks import task as django_task
else:
    from django_tasks import TaskContext, TaskResultStatus
    from django_tasks import task as django_task


class Broken(Exception):
    """An error of a module, so that its class has a path."""


@django_task(takes_context=True)
def recover(context: TaskContext, attempts: int) -> dict[str, Any]:
    if context.attempt < attempts:
        raise Broken(f"attempt {context.attempt}\nValueError: not this line")
    return {"id": context.task_result.id, "attempt": context.attempt}


@django_task(queue_name="default")
async def recover_async() -> None:
    await asyncio.sleep(0)
    raise ValueError("no good")


@django_task
def return_a_set() -> set[int]:
    return {1}


snoozed: list[str] = []
"""Jobs that have been put off."""


@django_task(takes_context=True)
def snooze_once(context: TaskContext) -> None:
    if context.task_result.id not in snoozed:
        snoozed.append(context.task_result.id)
        raise Snooze(60)


@task()
def note(number: int) -> int:
    return number


@task()
def complete_with_rows(context: Context) -> None:
    with transaction.atomic():
        context.sync.complete(connection)


class BackendTests(TransactionTestCase):
    """Results of tasks that workers run, with their retries, in virtual time."""

    def receive_signals(self) -> list[tuple[Any, str]]:
        """Returns a list to which each signal is added, with the status that it tells."""
        seen: list[tuple[Any, str]] = []
        for signal in (enqueued, started, finished):

            def receive(task_result: Any, signal: Any = signal, **_: Any) -> None:
                seen.append((signal, task_result.status))

            signal.connect(receive, weak=False, dispatch_uid="seen")
            self.addCleanup(signal.disconnect, dispatch_uid="seen")
        return seen

    async def test_results_have_attempts_errors_and_signals(self) -> None:
        seen = self.receive_signals()
        async with testing.Harness(app) as harness:
            result = await recover.aenqueue(attempts=3)
            self.assertEqual((result.status, result.attempts), (TaskResultStatus.READY, 0))
            await harness.run_until_idle()
            await result.arefresh()
        self.assertEqual(result.return_value, {"id": result.id, "attempt": 3})
        self.assertEqual((result.status, result.attempts), (TaskResultStatus.SUCCESSFUL, 3))
        self.assertEqual([error.exception_class for error in result.errors], [Broken, Broken])
        self.assertIn('raise Broken(f"attempt', result.errors[0].traceback)
        self.assertLess(result.started_at, result.last_attempted_at)
        self.assertLessEqual(result.enqueued_at, result.started_at)
        running = [(started, TaskResultStatus.RUNNING)] * 3
        end = [(finished, TaskResultStatus.SUCCESSFUL)]
        self.assertEqual(seen, [(enqueued, TaskResultStatus.READY), *running, *end])

    async def test_tasks_fail_after_their_last_attempt(self) -> None:
        async with testing.Harness(app, max_attempts=2) as harness:
            failing, unsupported = await recover_async.aenqueue(), await return_a_set.aenqueue()
            with self.assertLogs(django_task.__module__.partition(".base")[0], "ERROR") as logs:
                await harness.run_until_idle()
            for result, attempts, kind in ((failing, 2, ValueError), (unsupported, 1, UnsupportedResult)):
                await result.arefresh()
                self.assertEqual((result.status, result.attempts), (TaskResultStatus.FAILED, attempts))
                self.assertIs(result.errors[-1].exception_class, kind)
                self.assertIsNotNone(result.finished_at)
        self.assertEqual(len(logs.records), 2)

    async def test_snooze_in_the_last_attempt_is_no_end(self) -> None:
        seen = self.receive_signals()
        async with testing.Harness(app, max_attempts=1) as harness:
            result = await snooze_once.aenqueue()
            await harness.run_until_idle()
            await result.arefresh()
        self.assertEqual(result.status, TaskResultStatus.SUCCESSFUL)
        running = [(started, TaskResultStatus.RUNNING)] * 2
        end = [(finished, TaskResultStatus.SUCCESSFUL)]
        self.assertEqual(seen, [(enqueued, TaskResultStatus.READY), *running, *end])

    def test_options_of_tasks_become_those_of_jobs(self) -> None:
        later = timezone.now() + timedelta(hours=1)
        result = recover.using(priority=7, run_after=later).enqueue(attempts=1)
        job = app.sync.get(result.id)
        self.assertEqual((job.task, job.queue, job.priority, job.run_at), (recover.module_path, "default", 7, later))
        read = recover.get_result(result.id)
        self.assertEqual((read, read.task.run_after, read.kwargs), (result, later, {"attempts": 1}))

    def test_jobs_of_other_tasks_are_no_results(self) -> None:
        job = note.sync.enqueue(1)
        with self.assertRaises(TaskResultDoesNotExist):
            recover.get_result(job.id)


class TransactionTests(TestCase):
    """Jobs of another store than the database: the shop's tests have a SQLite database in memory."""

    def test_every_submission_waits_for_the_commit(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            with self.assertRaises(ZeroDivisionError), transaction.atomic():
                note.sync.enqueue(0)
                raise ZeroDivisionError
            one = [note.sync.enqueue(1), app.sync.enqueue(note.name, {"number": 2}), recover.enqueue(attempts=1)]
            many = app.sync.enqueue_many([note.new_job(3), note.new_job(4)])
            batch = app.sync.enqueue_batch([note.new_job(5)])
            self.assertEqual(app.sync.count(), 0)
        self.assertEqual(app.sync.count(), 7)
        self.assertEqual({app.sync.get(each.id).state for each in (*one, *many)}, {"queued"})
        self.assertTrue(app.sync.read_batch(batch.id))

    def test_each_test_finds_no_job_of_an_earlier_one(self) -> None:
        """Runs with the test above, in any order: each leaves jobs behind."""
        self.assertEqual(app.sync.count(), 0)
        with self.captureOnCommitCallbacks(execute=True):
            note.sync.enqueue(1)
        self.assertEqual(app.sync.count(), 1)

    def test_messages_name_the_open_transaction(self) -> None:
        with testing.manual(app):
            handle = note.sync.enqueue(1)
            message = r"1 job waits for the commit: wrap the call in captureOnCommitCallbacks\(execute=True\), and"
            for look in (testing.assert_enqueued, testing.refute_enqueued, testing.enqueued):
                with self.assertRaisesRegex(AssertionError, message):
                    look(app, task=note, args={"number": 1})
            testing.refute_enqueued(app, args={"number": 2})
            for read in (handle.sync.result, lambda: app.sync.get(handle.id)):
                with self.assertRaisesRegex(NotFound, "its transaction has not committed"):
                    read()

    def test_jobs_from_before_a_mode_are_none_of_its_own(self) -> None:
        note.sync.enqueue(1)
        with testing.manual(app):
            testing.refute_enqueued(app)

    def test_callbacks_after_their_mode_are_refused(self) -> None:
        message = "the test mode in which this was enqueued has ended"
        with (
            self.assertRaisesRegex(HoldfastError, message),
            self.captureOnCommitCallbacks(execute=True),
            testing.inline(app),
        ):
            note.sync.enqueue(1)
        self.assertEqual(app.sync.count(), 0)

    def test_completion_in_a_mode_names_the_real_commit(self) -> None:
        with (
            testing.inline(app),
            self.assertRaisesRegex(Invalid, "real commit .* in a TransactionTestCase"),
            self.captureOnCommitCallbacks(execute=True),
        ):
            complete_with_rows.sync.enqueue()

    def test_model_of_the_admin_reads_no_table(self) -> None:
        with self.assertNumQueries(0):
            call_command("dumpdata", "holdfast", stdout=(dumped := StringIO()))
            self.assertEqual(
                (dumped.getvalue().strip(), Job.objects.count(), Job._base_manager.first()), ("[]", 0, None)
            )

    async def test_async_submissions_join_the_transaction_of_the_test(self) -> None:
        waiting = sync_to_async(lambda: len(connection.run_on_commit))  # the test's connection is of its own thread
        before = await waiting()
        await note.enqueue(1)
        await recover.aenqueue(attempts=1)
        await app.enqueue_many([note.new_job(2)])
        self.assertEqual((await app.count(), await waiting() - before), (0, 3))


class AccessTests(SimpleTestCase):
    """Tests that may not use the database."""

    async def test_jobs_are_refused(self) -> None:
        for submit in (sync_to_async(note.sync.enqueue), note.enqueue):
            with self.assertRaises(DatabaseOperationForbidden):
                await submit(1)
        async with testing.Harness(app):
            await note.enqueue(1)


class SettingsTests(SimpleTestCase):
    """``HOLDFAST``, the URL of a database, and the arguments of ``manage.py``."""

    def test_urls_name_the_server_of_the_database(self) -> None:
        plain = {"NAME": "shop", "USER": "", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": {}}
        for changes, url in (
            ({}, "postgresql:///shop"),
            (
                {"USER": "a@b", "PASSWORD": "p:/w", "HOST": "db", "PORT": 5433},
                "postgresql://a%40b:p%3A%2Fw@db:5433/shop",
            ),
            ({"HOST": "a,b", "PORT": "1,2", "NAME": "my shop"}, "postgresql://a:1,b:2/my%20shop"),
            ({"HOST": "::1", "PORT": "1", "PASSWORD": "p"}, "postgresql://:p@[::1]:1/shop"),
            ({"PORT": "5433"}, "postgresql:///shop?port=5433"),
            ({"HOST": "/run/pg", "PORT": "5433"}, "postgresql:///shop?host=%2Frun%2Fpg&port=5433"),
            ({"HOST": "db", "OPTIONS": {"sslmode": "require", "pool": True}}, "postgresql://db/shop?sslmode=require"),
            ({"NAME": "", "OPTIONS": {"service": "shop"}}, "postgresql:///?service=shop"),
        ):
            self.assertEqual(_postgres_url(plain | changes), url)

    def test_wrong_settings_are_named(self) -> None:
        for given, problem in (
            ({"CONCURENCY": 2}, "HOLDFAST: .*did you mean concurrency"),
            ({"URL": 3}, "url"),
            ({"DATABSE": "default"}, r'HOLDFAST\["DATABSE"\] is not a setting; did you mean DATABASE\?'),
            (["x"], "HOLDFAST: .*; give settings such as"),
            ({"DATABASE": "jobs"}, r'HOLDFAST\["DATABASE"\]: \'jobs\' is no alias of DATABASES; give one of: default'),
        ):
            with override_settings(HOLDFAST=given), self.assertRaisesRegex(ImproperlyConfigured, problem):
                DjangoHoldfast()
        with override_settings(HOLDFAST={"URL": "redis://127.0.0.1:1", "CONCURRENCY": 3}):
            other = DjangoHoldfast()
        self.assertEqual((other.settings.url, other.settings.concurrency), ("redis://127.0.0.1:1", 3))
        self.assertFalse(other.holds_jobs)

    def test_options_of_django_are_left_out(self) -> None:
        given = ["--settings", "x", "run", "--pythonpath=y", "--json", "--", "ls", "--settings", "z"]
        self.assertEqual([*without_django_options(given)], ["run", "--json", "--", "ls", "--settings", "z"])
