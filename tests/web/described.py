"""The API as Schemathesis knows it: by its document alone."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from holdfast import Holdfast
from holdfast.web import create_app
from holdfast.web.asgi import OPERATIONS
from holdfast.web.routing import Operation


class Described:
    """An API on this store, whose answers are held against its own description. Use it with ``with``.

    positive_data_acceptance is left out: a schema cannot say which characters are visible, or what
    a cursor was. What is refused so is in the tables of bad inputs.
    """

    def __init__(self, url: str) -> None:
        self._app = Holdfast(url, claim_wait="0s", event_stream_for="0s")  # nothing is waited for
        self._described = schemathesis.openapi.from_asgi("/openapi.json", create_app(self._app))

    def __enter__(self) -> Described:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._app.sync.close()

    def ask(self, operation: Operation, mode: GenerationMode, *, examples: int, chance: int | None = None) -> int:
        """Ask so many times, by the schema or against it, each time another thing; how many there were to ask.

        ``chance``: draws others than the usual ones. AssertionError: an error of ours, or an answer that is not
        described."""
        asked: list[None] = []
        options = settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=chance is None,
            database=None,
        )

        @options
        @given(case=self._described[operation.path][operation.method].as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            asked.append(None)
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        try:
            (ask if chance is None else seed(chance)(ask))()
        except Unsatisfiable:  # an operation that takes nothing cannot be asked wrongly
            return 0
        return len(asked)


def complaints(url: str, *, examples: int, chance: int) -> tuple[list[str], int]:
    """What is wrong with any operation, asked so many times in either mode; and how many times all were asked."""
    found: list[str] = []
    asked, rng = 0, random.Random(chance)
    with Described(url) as described:
        for operation in OPERATIONS:
            for mode in GenerationMode:
                try:
                    asked += described.ask(operation, mode, examples=examples, chance=rng.randrange(1 << 32))
                except Exception as error:
                    found.append(f"{operation.name}, {mode.value}: {error}")
    return found, asked
