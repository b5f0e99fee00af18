"""The order of the API's routes."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import Match, Route

from holdfast.web.asgi import OPERATIONS
from holdfast.web.messages import ApiRequest, ApiResponse
from holdfast.web.routing import HOT_PATHS, Operation, router_of


async def _respond(request: ApiRequest, operation: Operation, path: Mapping[str, str]) -> ApiResponse:
    raise AssertionError("no request is sent")


def test_hot_routes_exist_and_come_first() -> None:
    routes = [route for route in router_of(OPERATIONS, _respond, None).routes if isinstance(route, Route)]
    assert [route.path for route in routes[: len(HOT_PATHS)]] == list(HOT_PATHS)
    for fixed in (route.path for route in routes if "{" not in route.path):
        scope = {"type": "http", "method": "GET", "path": fixed}
        matching = [route.path for route in routes if route.matches(scope)[0] is not Match.NONE]
        assert matching[0] == fixed, f"a pattern hides {fixed}"
