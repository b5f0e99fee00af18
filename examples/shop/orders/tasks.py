"""The jobs of the shop. Holdfast imports this module by its name."""

import django
from django.core.mail import send_mail
from django.db.models import F

from holdfast.integrations.django import task
from orders.models import Order

if django.VERSION >= (6,):
    from django.tasks import task as django_task
else:
    from django_tasks import task as django_task


@task()
def confirm(order_id: int) -> str:
    """Confirms an order."""
    order = Order.objects.get(id=order_id)
    send_mail("Thank you", f"Order {order.id} is confirmed.", "shop@example.com", [order.email])
    Order.objects.filter(id=order_id).update(confirmed=True, mails=F("mails") + 1)
    return f"order {order_id} confirmed"


@task()
async def count_orders() -> int:
    """Counts the orders, in an async handler."""
    return await Order.objects.acount()


@task(executor="process")
def list_addresses() -> list[str]:
    """Lists the addresses of customers, in a child process."""
    return list(Order.objects.values_list("email", flat=True).distinct().order_by("email"))


@django_task(priority=-10)
def send_issue(number: int) -> int:
    """Sends an issue of the newsletter: a task of ``django.tasks``."""
    emails = Order.objects.values_list("email", flat=True).distinct()
    return sum(send_mail(f"Issue {number}", "News.", "shop@example.com", [email]) for email in emails)
