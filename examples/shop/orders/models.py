"""Orders."""

from django.db import models


class Order(models.Model):
    """An order, confirmed by a job."""

    email = models.EmailField()
    confirmed = models.BooleanField(default=False)
    mails = models.PositiveIntegerField(default=0)
