"""The Django application: creates the schema with ``migrate``, and imports the ``tasks`` modules of the project."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from glob import escape
from pathlib import Path
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.management import CommandError
from django.db import connections
from django.db.backends.base.base import NO_DB_ALIAS
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from holdfast.core.errors import ConfigError
from holdfast.core.models import JobFilter
from holdfast.integrations.django import app
from holdfast.settings.settings import SETTINGS
from holdfast.stores.sqlite.connection import WAL_RESET_FIXED_VERSION

_ALL = 1_000_000  # jobs of one call, as many as it may take


class HoldfastConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Holdfast as an application of a Django project."""

    name = "holdfast.integrations.django"
    label = "holdfast"
    verbose_name = "Holdfast"

    def ready(self) -> None:
        """Connects signals, registers the checks of the project, and imports the modules ``tasks`` of the project."""
        checks.register(check_transaction_mode)
        checks.register(check_setting_names)
        checks.register(check_application)
        checks.register(check_database)
        post_migrate.connect(prepare_store, sender=self)
        connection_created.connect(leave_databases)
        connection_created.connect(keep_checkpoints)
        autodiscover_modules("tasks")


def check_transaction_mode(**_: Any) -> list[checks.Warning]:
    """Warns of a SQLite file whose transactions do not wait for the jobs that others write."""
    connection = connections[app.database]
    mode = str(connection.settings_dict["OPTIONS"].get("transaction_mode")).upper()
    if connection.vendor != "sqlite" or not app.holds_jobs or mode == "IMMEDIATE":
        return []
    text = f"DATABASES[{app.database!r}]: a transaction that reads and then writes fails while a worker writes."
    hint = f'DATABASES[{app.database!r}]["OPTIONS"] = {{"transaction_mode": "IMMEDIATE"}} lets it wait.'
    return [checks.Warning(text, hint=hint, id="holdfast.W001")]


def check_setting_names(**_: Any) -> list[checks.Warning]:
    """Warns of settings that stand beside the dictionary ``HOLDFAST`` instead of in it."""
    beside = [name for name in SETTINGS if hasattr(settings, f"HOLDFAST_{name.upper()}")]
    return [
        checks.Warning(
            f"HOLDFAST_{name.upper()} has no effect.", hint=f'HOLDFAST = {{"{name.upper()}": …}}', id="holdfast.W002"
        )
        for name in beside
    ]


def check_database(**_: Any) -> list[checks.Warning]:
    """Warns of a URL of another database than Django's, of the same kind: jobs are not part of its transactions."""
    vendor = connections[app.database].vendor
    if app.derives_url or app.holds_jobs or not app.settings.url.startswith(vendor.removesuffix("ql")):
        return []
    text = f"HOLDFAST: URL names another database than DATABASES[{app.database!r}]: jobs are submitted on commit."
    hint = "Leave URL out to store them with your rows, or silence this if they belong elsewhere."
    return [checks.Warning(text, hint=hint, id="holdfast.W003")]


def check_application(**_: Any) -> list[checks.Error]:
    """Finds what would end each worker at its start: a URL of no store, and tasks that cannot be run."""
    checked: list[tuple[str, Callable[[], object]]] = [("E002", app.new_store)]
    checked += [("E003", task.check_runnable) for task in app.registry]
    found = []
    for id, check in checked:
        try:
            check()
        except ConfigError as error:
            found.append(checks.Error(str(error), id=f"holdfast.{id}"))
    return found


def prepare_store(*, using: str, verbosity: int = 0, **sent: Any) -> None:
    """After ``migrate``: brings the schema up to date. After ``flush``, which deletes all data: deletes the jobs."""
    if using != app.database or not app.derives_url:
        return
    _check_lock(using)
    if "plan" not in sent:  # flush
        while app.sync.delete(JobFilter(), limit=_ALL).more:
            pass
        return
    applied = app.sync.migrate()
    if applied and verbosity:
        sent["stdout"].write(f"  Applying holdfast: {', '.join(applied)}\n")
    app.release_database()
    connection = connections[using]
    test_name = connection.settings_dict["TEST"]["NAME"]
    if connection.vendor == "sqlite" and test_name and connection.settings_dict["NAME"] == test_name:
        _ready_for_clones(connection, Path(test_name))


def _ready_for_clones(connection: Any, path: Path) -> None:
    """Takes a new test database out of WAL mode, and removes logs that clones of an earlier run have left.

    ``test --parallel`` copies the file without its log, and SQLite would apply a log that lies beside the copy.
    """
    if not connection.in_atomic_block:
        connection.introspection.table_names()  # by a read SQLite notices the mode that Holdfast has given the file
        connection.cursor().execute("pragma journal_mode = delete")
    for log in path.parent.glob(f"{escape(path.stem)}_*{escape(path.suffix)}-wal"):
        if not log.with_name(log.name.removesuffix("-wal")).exists():
            log.unlink()


def _check_lock(alias: str) -> None:
    """Raises CommandError if Django holds the lock of the file of the jobs in a transaction that it does not commit."""
    connection = connections[alias]
    is_manual = connection.vendor == "sqlite" and not connection.settings_dict["AUTOCOMMIT"]
    if is_manual and app.holds_jobs and connection.connection is not None and connection.connection.in_transaction:
        raise CommandError(
            f"DATABASES[{alias!r}]: with AUTOCOMMIT False Django does not commit what this command wrote, and the lock "
            "of the file is never free for Holdfast; run the command with AUTOCOMMIT True"
        )


def leave_databases(*, connection: Any, **_: Any) -> None:
    """Closes the store when Django connects to no database: it creates, copies or drops one."""
    if connection.alias == NO_DB_ALIAS:
        app.release_database()


def keep_checkpoints(*, connection: Any, **_: Any) -> None:
    """Leaves checkpoints of the file of the jobs to Holdfast, where SQLite has a fault in concurrent ones."""
    is_faulty = connection.vendor == "sqlite" and sqlite3.sqlite_version_info < WAL_RESET_FIXED_VERSION
    if is_faulty and connection.alias == app.database and app.holds_jobs:
        connection.connection.execute("pragma wal_autocheckpoint=0")
