"""Views: a sync one in a transaction, and async ones."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from orders.models import Order
from orders.tasks import confirm, send_issue


@csrf_exempt
@require_POST
def create_order(request: HttpRequest) -> JsonResponse:
    """Stores an order and the job that confirms it: both, or neither."""
    with transaction.atomic():
        order = Order.objects.create(email=request.POST["email"])
        job = confirm.options(key=f"order-{order.id}").sync.enqueue(order.id)
        if "@" not in order.email:
            raise ValueError("no such address")
    return JsonResponse({"order": order.id, "job": job.id}, status=202)


async def show_order(request: HttpRequest, order_id: int) -> JsonResponse:
    """Shows whether an order is confirmed."""
    order = await Order.objects.aget(id=order_id)
    return JsonResponse({"order": order.id, "confirmed": order.confirmed})


@csrf_exempt
@require_POST
async def send_newsletter(request: HttpRequest) -> JsonResponse:
    """Enqueues a task of ``django.tasks`` from an async view."""
    result = await send_issue.aenqueue(int(request.POST["number"]))
    return JsonResponse({"result": result.id}, status=202)
