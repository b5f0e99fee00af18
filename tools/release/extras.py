"""The extras of the package, and the modules that each is for."""

from __future__ import annotations

from collections.abc import Iterable

MODULES = {
    "core": [
        "holdfast",
        "holdfast.cli",
        "holdfast.worker",
        "holdfast.testing",
        "holdfast.stores.sqlite",
        "holdfast.importing",
    ],
    "web": ["holdfast.web", "holdfast.cli"],
    "encryption": ["holdfast.integrations.cryptography"],
    "postgres": ["holdfast.stores.postgres", "holdfast.transports.transport_store"],
    "redis": ["holdfast.stores.redis", "holdfast.transports.redis"],
    "otel": ["holdfast.telemetry.spans"],
    "django": ["holdfast.integrations.django"],
    "django-tasks": ["holdfast.integrations.django", "holdfast.integrations.django.backend"],
    "fastapi": ["holdfast.integrations.fastapi"],
    "celery": ["holdfast.integrations.celery"],
    "metrics": ["holdfast.telemetry.metric_types", "holdfast.worker"],
    "pydantic": ["holdfast.tasks"],
    "pytest": ["holdfast.testing", "holdfast_pytest"],
}
"""Modules that an extra is for, and that its packages suffice for."""
_DJANGO = """
import django.conf, sys
apps = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.admin", "holdfast.integrations.django"]
django.conf.settings.configure(INSTALLED_APPS=apps, HOLDFAST={"URL": "sqlite:///none.db"})
django.setup()
"""
_SETUP = {"django": _DJANGO, "django-tasks": _DJANGO}
_NEEDED = {"holdfast.testing.fixtures": "pytest", "holdfast.integrations.django.backend": "django_tasks"}
"""Modules that need a package which not each extra with them installs: imported where it is there."""
_CODE = """
import importlib, importlib.util, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
{setup}
for name in {used!r}:
    module = importlib.import_module(name)
    for each in pkgutil.iter_modules(getattr(module, "__path__", []), name + ".") if name != "holdfast" else ():
        if each.name.rpartition(".")[2] != "__main__" and (
            each.name not in {needed!r} or importlib.util.find_spec({needed!r}[each.name])
        ):
            importlib.import_module(each.name)
"""


def import_code(extra: str, blocked: Iterable[str] = ()) -> str:
    """Returns a program that imports the modules of an extra, with these packages as if they were not installed."""
    setup = _SETUP.get(extra, "")
    return _CODE.format(blocked=list(blocked), used=MODULES[extra], needed=_NEEDED, setup=setup)
