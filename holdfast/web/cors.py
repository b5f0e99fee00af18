"""Pages in browsers: which sites' may ask at all, and which may change anything."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.web.responses import ApiRequest, ApiResponse, Header, Refusal

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_HEADERS = b"authorization, content-type, idempotency-key, last-event-id, x-api-key, x-request-id"
_EXPOSED = b"location, ratelimit, ratelimit-policy, retry-after, x-request-id"
_VARY: Header = (b"vary", b"origin")


class Origins:
    """The sites whose pages may call the API; none unless they are named."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(each.encode() for each in allowed)

    def response_headers(self, request: ApiRequest) -> tuple[Header, ...]:
        """Returns the headers that let a page of an allowed site read the answer."""
        if not self._allowed:
            return ()
        origin = request.headers.get(b"origin")
        if origin not in self._allowed:
            return (_VARY,)
        return (_VARY, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED))

    def preflight(self, request: ApiRequest) -> ApiResponse | None:
        """The answer to a browser that asks whether a page may ask; None: this is another question."""
        if request.method != "OPTIONS" or b"access-control-request-method" not in request.headers:
            return None
        if request.headers.get(b"origin") not in self._allowed:
            return None
        allow = (
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", _HEADERS),
            (b"access-control-max-age", b"600"),
        )
        return ApiResponse(204, headers=allow)

    def check_origin(self, request: ApiRequest) -> None:
        """A browser says which site's page makes it ask: of others none may change anything."""
        origin = request.headers.get(b"origin")
        if request.method in _SAFE_METHODS or origin in self._allowed:
            return
        site = request.headers.get(b"sec-fetch-site")
        if site is None:  # an older browser, or none at all, which names no origin either
            same = origin is None or origin.partition(b"://")[2] == request.headers.get(b"host")
        else:
            same = site in (b"none", b"same-origin")
        if not same:
            detail = "a page of another site may not change anything"
            raise Refusal(403, "cross_site", detail, "call from the same origin, or from outside a browser")
