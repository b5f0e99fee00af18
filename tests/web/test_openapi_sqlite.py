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


PRIVATE = {"Because", "Asked", "Kept", "Standing", "Nothing", "say", "follow"}
VERBS = {"append", "cancel", "check", "claim", "create", "delete", "deregister", "explain", "extend", "fork", "list"}
VERBS |= {"pause", "replay"}
VERBS |= {"resume", "settle", "send", "show", "stop", "stream", "submit", "add", "remove", "run", "backfill", "edit"}
VERBS |= {"change", "count", "reset", "start"}


def test_schema_and_operation_names_suit_generated_clients() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    words = {word for name in schemas for word in re.findall("[A-Z][a-z]*", name)}
    assert words & {*PRIVATE, "Document"} == set()
    assert {name: schema["title"] for name, schema in schemas.items() if "title" in schema} == {
        name: name for name, schema in schemas.items() if "title" in schema
    }
    assert {name.partition("_")[0] for name in NAMES} <= VERBS


def _inner(value: Any) -> Iterator[dict[str, Any]]:
    """Every schema, whatever it stands in."""
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict):
        yield value
    for inner in each:
        yield from _inner(inner)


def test_each_enum_is_named_once_and_constants_are_typed() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    enums = [sorted(each["enum"]) for each in _inner(DOCUMENT) if isinstance(each.get("enum"), list)]
    assert len({tuple(each) for each in enums}) == len(enums)
    assert all(schema["type"] == "string" for schema in schemas.values() if "enum" in schema)
    shown = ({**schema, "not": None} for schema in schemas.values())
    assert all("type" in each for schema in shown for each in _inner(schema) if "const" in each)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("JobSelection", {"ids": ["a"]}, {"ids": ["a"], "all": True}),
        ("ReplayRequest", {"all": True, "rate": "1/s"}, {"dry_run": True}),
        ("Submission", {"task": "t", "payload": {}, "delay": 1}, {"delay": 1, "run_at": "2030-01-31T08:00:00Z"}),
        ("Submission", {"task": "t", "payload": {}, "unique": {"during": "active", "by": ["args.a"]}}, {"unique": {}}),
        ("Submission", {"task": "t", "payload": {}, "unique": 60}, {"unique": {"during": 60, "on_conflict": "drop"}}),
        ("SettlementRequest", {"token": "t", "outcome": "released"}, {"result": 1}),
        ("SettlementRequest", {"token": "t", "outcome": "snoozed", "delay": 1}, {"outcome": "failed"}),
    ],
)
def test_exclusive_fields_are_declared_exclusive(form: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    check = _resolver({"$ref": f"#/components/schemas/{form}"})
    assert check.is_valid(good)
    changed = bad if form == "ReplayRequest" else {**good, **bad}
    assert not check.is_valid(changed)


def test_metrics_declare_text_before_json() -> None:
    content = DOCUMENT["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert list(content) == ["text/plain", "application/openmetrics-text", "application/json"]


def test_security_schemes_stand_with_and_without_keys() -> None:
    keyed = openapi(OPERATIONS, keys=True)
    assert set(keyed["components"]["securitySchemes"]) == set(DOCUMENT["components"]["securitySchemes"]) != set()
    submit = keyed["paths"]["/v1/jobs"]["post"]["security"]
    assert _described(OPERATIONS[0])["security"] == [*submit, {}]


def test_operations_have_names_and_words_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for operation in OPERATIONS:
        given = _described(operation)
        assert given["summary"]
        assert not given["summary"].endswith(".")
        assert {"503", *map(str, operation.answers)} <= set(given["responses"])


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_every_example_fits_its_schema(operation: Operation) -> None:
    given = _described(operation)
    for parameter in given.get("parameters", []):
        if "example" in parameter:
            assert _resolver(parameter["schema"]).is_valid(parameter["example"]), parameter
    contents = [response["content"] for response in given["responses"].values() if "content" in response]
    contents += [given["requestBody"]["content"]] if "requestBody" in given else []
    for content in contents:
        for each in content.values():
            if "example" in each:
                assert _resolver(each["schema"]).is_valid(each["example"]), each


def test_the_reference_page_is_current() -> None:
    """If not: python -m tests.support.api_page > docs/http-api.md"""
    assert (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8") == api_page.page()


def test_every_code_is_in_the_guide() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "holdfast" / "web").glob("*.py")))
    source += (ROOT / "holdfast" / "tasks" / "codec.py").read_text(encoding="utf-8")
    source += (ROOT / "holdfast" / "core" / "errors.py").read_text(encoding="utf-8")
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
