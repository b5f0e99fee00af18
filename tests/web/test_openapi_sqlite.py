"""The OpenAPI document is complete and true: every operation, every answer, every schema, examples included."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from schemathesis import GenerationMode

from holdfast.web.asgi import OPERATIONS
from holdfast.web.openapi import openapi
from holdfast.web.routing import Operation
from tests.support import api_page
from tests.support.pages import ROOT
from tests.web.client import Api
from tests.web.described import Described

DOCUMENT = json.loads(json.dumps(openapi(OPERATIONS, keys=False)))
NAMES = [operation.name for operation in OPERATIONS]


def _described(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = DOCUMENT["paths"][operation.path][operation.method.lower()]
    return described


def _resolver(schema: Any) -> Any:
    """A check of one schema that may refer to others of the document."""
    return jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})


def _schemas(value: Any) -> Iterator[str]:
    match value:
        case dict():
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for each in value.values():
                yield from _schemas(each)
        case list():
            for each in value:
                yield from _schemas(each)


def test_the_served_document_is_this_one(api: Api) -> None:
    assert api.get("/openapi.json") == DOCUMENT
    assert {"/v1/jobs", "/v1/jobs/{job_id}", "/health"} <= set(DOCUMENT["paths"])


def test_every_reference_leads_somewhere() -> None:
    names = {reference.removeprefix("#/components/schemas/") for reference in _schemas(DOCUMENT)}
    assert names <= set(DOCUMENT["components"]["schemas"])
    assert set(DOCUMENT["components"]["schemas"]) <= names


def test_operations_have_names_and_words_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for operation in OPERATIONS:
        said = _described(operation)
        assert said["summary"]
        assert not said["summary"].endswith(".")
        assert {"503", *map(str, operation.answers)} <= set(said["responses"])


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_every_example_fits_its_schema(operation: Operation) -> None:
    said = _described(operation)
    for parameter in said.get("parameters", []):
        if "example" in parameter:
            assert _resolver(parameter["schema"]).is_valid(parameter["example"]), parameter
    contents = [response["content"] for response in said["responses"].values() if "content" in response]
    contents += [said["requestBody"]["content"]] if "requestBody" in said else []
    for content in contents:
        for each in content.values():
            if "example" in each:
                assert _resolver(each["schema"]).is_valid(each["example"]), each


def test_the_reference_page_is_current() -> None:
    """If not: python -m tests.support.api_page > docs/http-api.md"""
    assert (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8") == api_page.page()


def test_every_code_is_in_the_guide() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "holdfast" / "web").glob("*.py")))
    source += (ROOT / "holdfast" / "task" / "codec.py").read_text(encoding="utf-8")
    source += (ROOT / "holdfast" / "errors.py").read_text(encoding="utf-8")
    codes = {*re.findall(r'\bcode="(\w+)"', source), *re.findall(r'Refusal\(\s*\d+,\s*"(\w+)"', source)}
    codes |= set(re.findall(r'^    code = "(\w+)"', source, re.MULTILINE))
    guide = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    assert {code for code in codes if f"`{code}`" not in guide} == set()


# ── Schemathesis ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    """The API as Schemathesis knows it: by its document alone."""
    with Described(f"sqlite:///{tmp_path_factory.mktemp('fuzz')}/holdfast.db") as described:
        yield described


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_no_request_breaks_the_server_or_its_description(
    operation: Operation, mode: GenerationMode, described: Described
) -> None:
    described.ask(operation, mode, examples=8)
