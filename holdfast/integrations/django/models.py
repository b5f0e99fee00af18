"""A model without a table, by which permissions and the admin know jobs."""

from __future__ import annotations

from django.db import models


class NoRows(models.Manager):  # type: ignore[misc]  # Django has no types
    """Reads nothing: dumpdata and pages of the admin that Django adds would otherwise query the table."""

    def get_queryset(self) -> models.QuerySet:
        """Returns an empty queryset."""
        return super().get_queryset().none()


class Job(models.Model):  # type: ignore[misc]  # Django has no types
    """A job. It has no rows: the admin reads jobs by the application, whatever store holds them."""

    id = models.UUIDField(primary_key=True)
    objects = NoRows()

    class Meta:
        """Known to permissions only."""

        managed = False
        base_manager_name = "objects"
        default_permissions = ("view", "change", "delete")
        verbose_name = "job"
