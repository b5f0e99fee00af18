"""Each extra installs every package that its modules import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools.release.extras import import_code

EXTRAS = {
    "core": (),
    "web": ("httptools", "jinja2", "prometheus_client", "starlette", "uvicorn"),
    "encryption": ("cryptography",),
    "postgres": ("asyncpg",),
    "redis": ("redis", "hiredis"),
    "otel": ("opentelemetry",),
    "django": ("django", "asgiref"),
    "django-tasks": ("django", "asgiref", "django_tasks"),
    "fastapi": ("fastapi", "starlette", "pydantic", "opentelemetry"),  # it needs the latter itself
    "celery": ("celery",),
    "metrics": ("prometheus_client",),
    "pydantic": ("pydantic",),
    "pytest": ("pytest",),
}
OPTIONAL = {package for packages in EXTRAS.values() for package in packages}


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_needs_no_package_of_another(extra: str) -> None:
    blocked = sorted(OPTIONAL - set(EXTRAS[extra]))
    code = import_code(extra, blocked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
