"""The table of operations as an OpenAPI 3.1 document, and the interactive reference at ``/docs``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import msgspec

from holdfast.core.error_groups import GROUP_PATTERN
from holdfast.telemetry.metrics import package_version
from holdfast.views.documents import ID
from holdfast.web.fields import NAME_PATTERN, REFERENCE_PATTERN, BodySchema, Field
from holdfast.web.messages import ApiResponse, Header, Problem, Refusal
from holdfast.web.routing import Operation, RequestContext, ResponseSpec

_REF = "#/components/schemas/{name}"
_SUFFIX = "Document"
"""Suffixes of document classes, removed for the names of schemas."""
_MAX_BODIES = 32  # documents kept: one for each place where the API is mounted
_ALWAYS = (429, 431, 503)
_WITH_KEY = (401, 403)
_PLACES: dict[str, dict[str, Any]] = {
    "job_id": {
        "description": "The job's id (a UUID, or its ULID form), or `key:` and its idempotency key.",
        "schema": {"type": "string", "pattern": REFERENCE_PATTERN},
        "example": ID,
    },
    "asset": {
        "description": "The file's name.",
        "schema": {"type": "string", "enum": ["docs.js", "swagger-ui-bundle.js", "swagger-ui.css"]},
    },
    "queue": {
        "description": "The queue's name.",
        "schema": {"type": "string", "pattern": NAME_PATTERN},
        "example": "default",
    },
    "schedule": {
        "description": "The schedule's name.",
        "schema": {"type": "string", "pattern": NAME_PATTERN},
        "example": "nightly-report",
    },
    "limit": {
        "description": "The limit's name.",
        "schema": {"type": "string", "pattern": NAME_PATTERN},
        "example": "crm",
    },
    "group": {
        "description": "The id of a group of errors.",
        "schema": {"type": "string", "pattern": GROUP_PATTERN},
        "example": "5f0c9a41d2be",
    },
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key: `hf_…`. Each operation needs a scope of it."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same, in a header."},
}
REFUSALS = {
    401: "A key is needed, and none that is good was shown.",
    403: "The key does not allow it, or a page of another site asked.",
    404: "There is no such job, queue, worker, schedule, limit or group of errors.",
    405: "This method is not possible here.",
    406: "It cannot be given in the format that is asked for.",
    408: "The body did not arrive in time.",
    409: "The state does not allow it.",
    413: "The body, or a value in it, is too large.",
    415: "The body is not `application/json`.",
    422: "A value is refused, and `field` names it; or a filter takes too long to look for.",
    429: "Too many requests.",
    431: "The headers are too large.",
    503: "The store is away, busy or full: try again.",
}


def with_description(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Returns the operations and the one that describes them all."""

    async def get_openapi(call: RequestContext) -> ApiResponse:
        keys, server = call.app.settings.keys_file is not None, call.request.root_path
        body = bodies.get((keys, server))
        if body is None:
            body = msgspec.json.encode(openapi(every, keys=keys, server=server))
            if len(bodies) < _MAX_BODIES:
                bodies[keys, server] = body
        return ApiResponse(200, body)

    description = Operation(
        name="show_openapi",
        method="GET",
        path="/openapi.json",
        scope="read",
        group="Description",
        summary="This description, for programs",
        handler=get_openapi,
        answers={200: ResponseSpec(dict, "An OpenAPI 3.1 document.")},
    )
    every = (*operations, description)
    bodies: dict[tuple[bool, str], bytes] = {}
    return every


def openapi(operations: Sequence[Operation], *, keys: bool = True, server: str = "") -> dict[str, Any]:
    """The whole document. ``keys``: a request needs one. ``server``: the path the API is mounted at."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, keys=keys)
    schemas = _schemas(operations)
    paths = _hoisted(paths, schemas)
    schemas |= {name: _hoisted(schema, schemas, top=True) for name, schema in list(schemas.items())}
    components: dict[str, Any] = {"schemas": dict(sorted(schemas.items())), "securitySchemes": _SCHEMES}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": package_version(),
            "description": "A durable job queue. `/health/ready` says what a crash of its store loses.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": quote(server) or "/"}],
        "paths": paths,
        "components": components,
    }


def refusals_of(operation: Operation) -> list[int]:
    """The statuses it may refuse a request with."""
    statuses = {*operation.refusals, *_ALWAYS, *(_WITH_KEY if operation.scope is not None else ())}
    if operation.query or operation.headers or operation.body or "{" in operation.path:
        statuses.add(422)
    if operation.body is not None:
        statuses |= {408, 413, 415}
    return sorted(statuses)


def _described(operation: Operation, *, keys: bool) -> dict[str, Any]:
    given: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.group],
        "summary": operation.summary,
        "responses": {
            **{str(status): _response(spec) for status, spec in operation.answers.items()},
            **{str(status): _refusal(status) for status in refusals_of(operation)},
        },
    }
    if operation.doc:
        given["description"] = operation.doc
    if operation.scope is not None:
        given["security"] = [{scheme: [operation.scope]} for scheme in _SCHEMES]
        if not keys:
            given["security"].append({})
    if parameters := list(_parameters(operation)):
        given["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": _REF.format(name=operation.body.name)}
        content = {"application/json": {"schema": schema, "example": example_body(operation.body)}}
        given["requestBody"] = {"required": not operation.body_optional, "content": content}
    return given


def _response(spec: ResponseSpec) -> dict[str, Any]:
    given: dict[str, Any] = {"description": spec.doc, "headers": {"X-Request-Id": _REQUEST_ID}}
    if spec.document is not None:
        schema = {"type": "object"} if spec.document is dict else {"$ref": _REF.format(name=spec.document.__name__)}
        content: dict[str, Any] = {"schema": schema}
        if spec.example is not None:
            content["example"] = spec.example
        if spec.stream:
            return given | {"content": {"text/event-stream": {"x-event-data": schema}}}
        given["content"] = {
            **{text: {"schema": {"type": "string"}} for text in spec.texts},
            "application/json": content,
        }
    elif spec.texts:
        given["content"] = {text: {"schema": {"type": "string"}} for text in spec.texts}
    return given


_REQUEST_ID = {"description": "Names this request in logs.", "schema": {"type": "string"}}


def _refusal(status: int) -> dict[str, Any]:
    headers: dict[str, Any] = {"X-Request-Id": _REQUEST_ID}
    if status == 401:
        headers["WWW-Authenticate"] = {"description": "How to say who asks.", "schema": {"type": "string"}}
    if status in (429, 503):
        headers["Retry-After"] = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
    schema = {"$ref": _REF.format(name="Problem")}
    doc = REFUSALS.get(status) or HTTPStatus(status).phrase
    return {"description": doc, "headers": headers, "content": {"application/problem+json": {"schema": schema}}}


def _parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", operation.path):
        yield {"name": name, "in": "path", "required": True, **_PLACES[name]}
    for location, fields in (("query", operation.query), ("header", operation.headers)):
        for field in fields:
            yield _parameter(location, field)


def _parameter(location: str, field: Field) -> dict[str, Any]:
    schema = {"type": "array", "items": field.value.schema} if field.many else field.value.schema
    given: dict[str, Any] = {"name": field.name, "in": location, "description": field.doc, "schema": schema}
    if field.required:
        given["required"] = True
    if field.example is not None:
        given["example"] = [field.example] if field.many else field.example
    return given


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _schemas(operations: Sequence[Operation]) -> dict[str, Any]:
    documents = {spec.document for each in operations for spec in each.answers.values()} - {None, dict}
    _, schemas = msgspec.json.schema_components([Problem, *documents], ref_template=_REF)
    bodies = [each.body for each in operations if each.body is not None]
    named = {}
    for name, schema in schemas.items():
        title = name.removesuffix(_SUFFIX)
        named[title] = {**schema, "title": title}
    return {**named, **{body.name: schema_of(body) for body in _with_inner(bodies)}}


def _hoisted(value: Any, schemas: dict[str, Any], *, top: bool = False) -> Any:
    """The same with references to ``schemas`` in place of enums that have a title, which are added there.

    ``top``: the value is a component itself.
    """
    match value:
        case {"$ref": str(reference)}:
            return {**value, "$ref": reference.removesuffix(_SUFFIX)}
        case {"enum": [str(), *_] as words} if "title" not in value or top:
            return {**value, "type": "string", "enum": words}
        case {"enum": [str(), *_] as words, "title": str(name)}:
            schemas.setdefault(name, {"type": "string", "enum": words, "title": name})
            rest = {key: each for key, each in value.items() if key not in ("type", "enum", "title")}
            return {"$ref": _REF.format(name=name), **rest}
        case dict():
            given = {key: _hoisted(each, schemas) for key, each in value.items()}
            return {**given, "additionalProperties": True} if _is_open(value) else given
        case list():
            return [_hoisted(each, schemas) for each in value]
    return value


def _is_open(schema: dict[str, Any]) -> bool:
    """An object of any fields, declared for generators of clients."""
    kinds = schema.get("type")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return is_object and not schema.keys() & {"properties", "additionalProperties"}


def _with_inner(bodies: Iterable[BodySchema]) -> Iterator[BodySchema]:
    for body in bodies:
        yield body
        yield from _with_inner(body.inner)


def schema_of(body: BodySchema) -> dict[str, Any]:
    """A body's schema."""
    schema: dict[str, Any] = {
        "type": "object",
        "description": body.doc,
        "additionalProperties": False,
        "required": [field.name for field in body.fields if field.required],
        "properties": {field.name: _property(field) for field in body.fields},
    }
    return {**schema, "not": {"anyOf": list(body.refused)}} if body.refused else schema


def _property(field: Field) -> dict[str, Any]:
    given = {**field.value.schema, "description": field.doc}
    return given if field.example is None else {**given, "examples": [field.example]}


def example_body(body: BodySchema) -> dict[str, Any]:
    """Returns an example body: the required fields and those that the body shows, or the first optional one."""
    shown = [field for field in body.fields if field.example is not None]
    wanted = [field for field in shown if field.required or field.name in body.shown] or shown[:1]
    return {field.name: field.example for field in wanted}


_PAGE = "docs.html"
_MEDIA = MappingProxyType(
    {
        _PAGE: b"text/html; charset=utf-8",
        "docs.js": b"text/javascript; charset=utf-8",
        "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
        "swagger-ui.css": b"text/css; charset=utf-8",
    }
)
ASSETS = tuple(name for name in _MEDIA if name != _PAGE)
# Swagger UI styles its elements one by one and draws its icons from data: URLs; everything else is of this origin.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


@cache
def _content(name: str) -> bytes:
    return files("holdfast.web").joinpath("swagger_ui", name).read_bytes()


def _file(name: str, *headers: Header) -> ApiResponse:
    return ApiResponse(200, _content(name), _MEDIA[name], headers)


async def show_page(_call: RequestContext) -> ApiResponse:
    """The page."""
    return _file(_PAGE, (b"content-security-policy", _POLICY))


async def show_asset(call: RequestContext) -> ApiResponse:
    """A script or style of the page."""
    name = call.path["asset"]
    if name not in ASSETS:
        raise Refusal(404, "unknown_path", "there is nothing at this path", "GET /openapi.json lists what there is")
    return _file(name, (b"cache-control", b"max-age=3600"))


OPERATIONS = (
    Operation(
        name="show_docs",
        method="GET",
        path="/docs",
        scope=None,
        group="Description",
        summary="Show the interactive reference, a page for browsers",
        doc="It comes from this API alone and asks no other site. An API with keys asks for one in the page.",
        handler=show_page,
        answers={200: ResponseSpec(None, "A page.", texts=("text/html",))},
    ),
    Operation(
        name="show_docs_asset",
        method="GET",
        path="/docs/{asset}",
        scope=None,
        group="Description",
        summary="Show a script or style of the interactive reference",
        handler=show_asset,
        answers={200: ResponseSpec(None, "The file.", texts=("text/javascript", "text/css"))},
        refusals=(404,),
    ),
)
