"""The interactive reference: Swagger UI over the OpenAPI document, from files of this package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from types import MappingProxyType

from holdfast.web.responses import ApiResponse, Header, Refusal
from holdfast.web.routing import Operation, RequestContext, ResponseSpec

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
