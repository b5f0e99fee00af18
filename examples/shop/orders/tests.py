"""Tests of the shop, as a Django project has them: `python manage.py test`."""

from django.contrib.auth.models import Permission, User
from django.core import mail
from django.db import transaction
from django.test import TestCase, TransactionTestCase
from django.utils.formats import date_format
from django.utils.timezone import localtime

from holdfast import testing
from holdfast.integrations.django import app
from orders.models import Order
from orders.tasks import confirm, count_orders, send_issue


class OrderTests(TestCase):
    """Each test is a transaction that is rolled back: jobs run when it would have been committed."""

    def test_an_order_is_confirmed(self) -> None:
        with testing.inline(app), self.captureOnCommitCallbacks(execute=True):
            response = self.client.post("/orders/", {"email": "a@example.com"})
            self.assertEqual(response.status_code, 202)
            self.assertFalse(Order.objects.get().confirmed)
        self.assertTrue(Order.objects.get().confirmed)
        self.assertEqual([message.to for message in mail.outbox], [["a@example.com"]])

    def test_an_order_enqueues_its_confirmation(self) -> None:
        with testing.manual(app):
            with self.captureOnCommitCallbacks(execute=True):
                order = self.client.post("/orders/", {"email": "a@example.com"}).json()["order"]
            testing.assert_enqueued(app, task="orders.tasks.confirm", args={"order_id": order}, count=1)

    def test_a_failed_order_enqueues_nothing(self) -> None:
        with testing.manual(app):
            with self.captureOnCommitCallbacks(execute=True), self.assertRaises(ValueError):
                self.client.post("/orders/", {"email": "nowhere"})
            testing.refute_enqueued(app)
        self.assertFalse(Order.objects.exists())

    async def test_async_views_enqueue(self) -> None:
        order = await Order.objects.acreate(email="a@example.com")
        response = await self.async_client.post("/newsletter/", {"number": "3"})
        self.assertEqual(response.status_code, 202)
        response = await self.async_client.get(f"/orders/{order.id}/")
        self.assertEqual(response.json(), {"order": order.id, "confirmed": False})

    def test_tasks_are_functions(self) -> None:
        order = Order.objects.create(email="a@example.com")
        self.assertEqual(confirm(order.id), f"order {order.id} confirmed")
        self.assertEqual(send_issue.call(7), 1)


class CommitTests(TransactionTestCase):
    """Tests whose transactions are real."""

    def test_jobs_are_stored_with_their_orders(self) -> None:
        for _ in range(2):  # the second time after a rollback
            with self.assertRaises(ZeroDivisionError), transaction.atomic():
                confirm.sync.enqueue(Order.objects.create(email="a@example.com").id)
                raise ZeroDivisionError
            self.assertEqual((Order.objects.count(), app.sync.count()), (0, 0))
        with transaction.atomic():
            job = confirm.sync.enqueue(Order.objects.create(email="a@example.com").id)
        self.assertEqual(job.sync.job().task, "orders.tasks.confirm")

    def test_nothing_is_left_of_other_tests(self) -> None:
        self.assertEqual(app.sync.count(), 0)
        count_orders.sync.enqueue()
        self.assertEqual(app.sync.count(), 1)

    def test_inline_jobs_run_at_the_commit(self) -> None:
        with testing.inline(app), transaction.atomic():
            order = Order.objects.create(email="a@example.com")
            confirm.sync.enqueue(order.id)
        self.assertTrue(Order.objects.get().confirmed)


class AdminTests(TransactionTestCase):
    """Jobs in the admin, by permission."""

    def test_staff_see_and_operate_on_jobs(self) -> None:
        job, other = confirm.sync.enqueue(1), confirm.options(queue="mail").sync.enqueue(2)
        staff = User.objects.create_user("ada", is_staff=True)
        self.client.force_login(staff)
        self.assertEqual(self.client.get("/admin/holdfast/job/").status_code, 403)
        staff.user_permissions.add(*Permission.objects.filter(codename__in=["view_job", "change_job"]))
        listed = self.client.get("/admin/holdfast/job/", {"state": "queued", "queue": "mail"})
        self.assertContains(listed, other.id)
        self.assertNotContains(listed, job.id)
        shown = self.client.get(f"/admin/holdfast/job/{job.id}/change/")
        self.assertContains(shown, "{&quot;order_id&quot;: 1}")
        self.assertContains(shown, date_format(localtime(job.sync.job().created_at), "DATETIME_FORMAT"))
        self.assertContains(shown, "Cancel")
        self.assertNotContains(shown, "Replay")
        cancelled = {"operation": "cancel", "id": [job.id, other.id]}
        self.assertContains(self.client.post("/admin/holdfast/job/", cancelled, follow=True), "Cancel: 2 jobs changed")
        replayed = {"operation": "replay", "id": job.id, "job": job.id}
        self.assertContains(self.client.post("/admin/holdfast/job/", replayed, follow=True), "Replay: 1 job changed")
        nothing = self.client.post("/admin/holdfast/job/", {"operation": "replay"}, follow=True)
        self.assertContains(nothing, "Items must be selected in order to perform actions on them")
        unknown = self.client.post("/admin/holdfast/job/", {"operation": "shred", "id": job.id})
        self.assertEqual(unknown.status_code, 400)
        self.assertEqual((job.sync.state(), other.sync.state()), ("queued", "cancelled"))
        self.assertEqual(self.client.get("/admin/holdfast/job/none/change/").status_code, 404)

    def test_staff_delete_jobs(self) -> None:
        kept, deleted = confirm.sync.enqueue(1), confirm.sync.enqueue(2)
        staff = User.objects.create_user("ada", is_staff=True)
        staff.user_permissions.add(Permission.objects.get(codename="view_job"))
        self.client.force_login(staff)
        chosen = {"operation": "delete", "id": deleted.id, "job": deleted.id}
        self.assertEqual(self.client.post("/admin/holdfast/job/", chosen).status_code, 403)
        self.assertEqual(app.sync.count(), 2)
        staff.user_permissions.add(Permission.objects.get(codename="delete_job"))
        self.assertContains(self.client.post("/admin/holdfast/job/", chosen), "Delete 1 job with all attempts")
        self.assertEqual(app.sync.count(), 2)
        listed = self.client.post("/admin/holdfast/job/", chosen | {"confirmed": "yes"}, follow=True)
        self.assertRedirects(listed, "/admin/holdfast/job/")
        self.assertContains(listed, "Delete: 1 job changed")
        self.assertEqual([job.id for job in app.sync.find().jobs], [kept.id])

    def test_staff_pause_and_resume_queues(self) -> None:
        confirm.options(queue="mail").sync.enqueue(1)
        staff = User.objects.create_user("ada", is_staff=True)
        staff.user_permissions.add(Permission.objects.get(codename="view_job"))
        self.client.force_login(staff)
        pause = {"operation": "pause", "queue": "mail"}
        self.assertNotContains(self.client.get("/admin/holdfast/job/"), "Pause")
        self.assertEqual(self.client.post("/admin/holdfast/job/", pause).status_code, 403)
        staff.user_permissions.add(Permission.objects.get(codename="change_job"))
        for operation, state in (("pause", "paused"), ("resume", "resumed")):
            done = self.client.post("/admin/holdfast/job/", pause | {"operation": operation}, follow=True)
            self.assertContains(done, f"Queue mail is {state}.")
            paused = [queue.name for queue in app.sync.queues() if queue.paused]
            self.assertEqual(paused, ["mail"] if operation == "pause" else [])
        refused = self.client.post("/admin/holdfast/job/", pause | {"queue": "no queue"}, follow=True)
        self.assertContains(refused, "use 1 to 64 of a-z")
