"""Each extra installs every package that its modules import."""

from __future__ import annotations

import subprocess
import sys

import pytest

EXTRAS = {
    "core": (),
    "web": ("httptools", "jinja2", "prometheus_client", "starlette", "uvicorn"),
    "postgres": ("asyncpg",),
    "redis": ("redis", "hiredis"),
    "otel": ("opentelemetry",),
    "fastapi": ("fastapi", "starlette", "pydantic", "opentelemetry"),  # it needs the latter itself
}
OPTIONAL = {package for packages in EXTRAS.values() for package in packages}
USED = {
    "core": ["holdfast", "holdfast.cli", "holdfast.worker", "holdfast.testing", "holdfast.stores.sqlite"],
    "web": ["holdfast.web", "holdfast.cli"],
    "postgres": ["holdfast.stores.postgres", "holdfast.transports.transport_store"],
    "redis": ["holdfast.stores.redis", "holdfast.transports.redis"],
    "otel": ["holdfast.telemetry.spans"],
    "fastapi": ["holdfast.integrations.fastapi"],
}
CODE = """
import importlib, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
for name in {used!r}:
    module = importlib.import_module(name)
    for each in pkgutil.iter_modules(getattr(module, "__path__", []), name + ".") if name != "holdfast" else ():
        if each.name.rpartition(".")[2] != "__main__":
            importlib.import_module(each.name)
"""


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_needs_no_package_of_another(extra: str) -> None:
    code = CODE.format(blocked=sorted(OPTIONAL - set(EXTRAS[extra])), used=USED[extra])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
