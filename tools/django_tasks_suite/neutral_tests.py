"""Tests of ``django.tasks``, or of its backport, that hold for every backend: run with Holdfast's.

    python -m tools.django_tasks_suite.neutral_tests FOLDER PACKAGE PASSED

PACKAGE in FOLDER has the tests. Fails if one fails, if fewer than PASSED pass, or if other tests than those of
``SKIPPED`` are skipped. Holdfast's backend takes the place of ``DummyBackend``. ``test_immediate_backend`` is left out:
it expects that a task has run when ``enqueue`` returns. ``test_custom_backend`` is, too: it tests backends of its own.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = ("test_tasks", "test_dummy_backend")
SKIPPED = {
    "reads `results`, the list of the dummy backend": {
        "DummyBackendTestCase.test_enqueue_task",
        "DummyBackendTestCase.test_enqueue_task_async",
        "DummyBackendTestCase.test_refresh_result",
        "DummyBackendTestCase.test_refresh_result_async",
        "DummyBackendTransactionTestCase.test_doesnt_wait_until_transaction_commit_by_default",  # of Django 6 only
        "TaskTestCase.test_enqueue_task",
        "TaskTestCase.test_enqueue_task_async",
    },
    "calls `clear` of the dummy backend": {"DummyBackendTestCase.test_clear"},
    "runs its task in the immediate backend": {
        "TaskTestCase.test_task_error_invalid_exception",
        "TaskTestCase.test_task_error_unknown_module",
    },
}
"""Names of tests by the reason why they say nothing of another backend."""


def main(folder: str, package: str, least: int) -> int:
    """Runs the tests; returns the exit status."""
    sys.path.insert(0, str(Path(folder).resolve()))
    with tempfile.TemporaryDirectory() as place:
        _set_up(f"sqlite:///{place}/jobs.db")
        cases = [case for name in MODULES for case in _test_cases(importlib.import_module(f"{package}.{name}"))]
        suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
        result = unittest.TextTestRunner(sys.stdout, verbosity=0).run(suite)
    skipped = {_name(test): reason for test, reason in result.skipped}
    print("\n".join(f"skipped {name}: {reason}" for name, reason in sorted(skipped.items())))
    passed = result.testsRun - len(skipped) - len(result.failures) - len(result.errors)
    print(f"tests of django.tasks: {passed} passed, {len(skipped)} skipped")
    problems = [f"{name} is skipped, but not listed" for name in skipped if skipped[name] not in SKIPPED]
    if passed < least:
        problems.append(f"{passed} tests passed; before, {least} did")
    print("".join(f"{problem}\n" for problem in problems), end="")
    return 0 if result.wasSuccessful() and not problems else 1


def _set_up(url: str) -> None:
    import django
    from django.conf import settings

    backport = ["django_tasks"] if django.VERSION < (6,) else []
    named = ("admin", "auth", "contenttypes", "messages", "sessions")  # of the paths of the backport's tests
    apps = [*(f"django.contrib.{name}" for name in named), *backport, "holdfast.integrations.django"]
    settings.configure(
        INSTALLED_APPS=apps, HOLDFAST={"URL": url}, USE_TZ=True, ALLOWED_HOSTS=["*"], ROOT_URLCONF="tests.urls"
    )
    django.setup()
    from holdfast.integrations.django.backend import HoldfastBackend

    dummy: Any = importlib.import_module(f"{backport[0] if backport else 'django.tasks'}.backends.dummy")
    dummy.DummyBackend = HoldfastBackend


def _test_cases(module: Any) -> Iterator[type[unittest.TestCase]]:
    """Yields the classes of tests of a module, without ``setUp``, which clears the dummy backend."""
    reasons = {name: reason for reason, names in SKIPPED.items() for name in names}
    for _, case in inspect.getmembers(module, inspect.isclass):
        if case.__module__ == module.__name__ and issubclass(case, unittest.TestCase):
            case.setUp = lambda self: None  # type: ignore[method-assign]
            for name in unittest.defaultTestLoader.getTestCaseNames(case):
                if reason := reasons.get(f"{case.__name__}.{name}"):
                    setattr(case, name, unittest.skip(reason)(getattr(case, name)))
            yield case


def _name(test: unittest.TestCase) -> str:
    return f"{type(test).__name__}.{test.id().rpartition('.')[2]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
