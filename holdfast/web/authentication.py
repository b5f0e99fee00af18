"""Admission of requests, before any operation sees them: hosts, rates, keys, and pages of other sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.app import Holdfast
from holdfast.core.errors import quote_value
from holdfast.core.events import KeyRefused
from holdfast.settings.settings import Settings
from holdfast.web.keys import Key, KeyCheck, Principal, unauthorized_refusal
from holdfast.web.keys import Scope as KeyScope
from holdfast.web.keys_file import Keyring, KeyUsage
from holdfast.web.messages import ApiRequest, ApiResponse, Header, Refusal
from holdfast.web.rate_limit import Proxies, Rate, address_network, host_of, is_unforgeable
from holdfast.web.routing import METRICS

_HSTS: Header = (b"strict-transport-security", b"max-age=31536000")
_LIVE = "/health/live"  # exempt from the address rate: a failed liveness probe restarts the process


class Authenticator:
    """Checks requests of one application. Raises ConfigError if the file of keys cannot be used.

    ``checks_hosts``: without keys, accept only known names in the Host header.
    """

    def __init__(self, app: Holdfast, *, checks_hosts: bool) -> None:
        settings, clock = app.settings, app.clock
        self._events = app.events
        self._keyring: Keyring | None = None
        if settings.keys_file is not None:
            path = Path(settings.keys_file)
            self._keyring, self._usage = Keyring(path, clock, app.events), KeyUsage(path, clock)
        self._proxies = Proxies(settings.trusted_proxies)
        self._origins = Origins(settings.allowed_origins)
        self._hosts = frozenset(each.lower() for each in settings.allowed_hosts)
        self._checks_hosts = bool(self._hosts) or (checks_hosts and self._keyring is None)
        self._metrics_open = settings.metrics_open
        self._own_host = settings.api_host.lower()
        self._by_address = _rate("address", settings.address_rate, settings, app)
        self._by_key = _rate("key", settings.key_rate, settings, app)
        self._refused = Rate("address", settings.refused_keys / 60, settings.refused_keys, clock)

    def list_warnings(self) -> list[str]:
        """Returns warnings for operators; the log says more."""
        if self._keyring is None or self._keyring.problem is None:
            return []
        return ["the file of keys cannot be used as it is; the last good keys are in force"]

    def admit_request(self, asgi_scope: Mapping[str, Any], request: ApiRequest) -> ApiResponse | None:
        """Checks host, address rate and CORS of a request, not its key; adds HSTS. Returns a preflight's answer."""
        request.client = self._proxies.client_of(request.client, asgi_scope["headers"])
        request.added += self._origins.response_headers(request)
        if self.is_over_tls(asgi_scope):
            request.added.append(_HSTS)
        if b"host" in request.repeated:
            raise Refusal(400, "several_hosts", "the request has several Host headers", "send one")
        if self._checks_hosts:
            self._check_host(request)
        if self._by_address is not None and request.path != _LIVE:
            _take(self._by_address, address_network(request.client), request)
        return self._origins.answer_preflight(request)

    def _check_host(self, request: ApiRequest) -> None:
        given = request.headers.get(b"host")
        if given is None:  # HTTP/1.0; no browser
            return
        host = host_of(given)
        if host is None or not (host in self._hosts or host == self._own_host or is_unforgeable(host)):
            remedy = "call it by its address, or name this host in allowed_hosts"
            raise Refusal(421, "unknown_host", f"this API is not called {quote_value(given.decode('latin-1'))}", remedy)

    def identify_caller(self, request: ApiRequest, scope: KeyScope | None, group: str = "") -> Principal:
        """Returns the principal of an operation; raises Refusal if it needs a scope and the key is not good."""
        self._origins.check_origin(request)
        if self._keyring is None or scope is None or (self._metrics_open and group == METRICS):
            return Principal(address=request.client)
        return self.admit_key(request, *self.identify_key(request, _presented_key(request)))

    @property
    def has_keys(self) -> bool:
        """Returns True if callers need a key."""
        return self._keyring is not None

    def identify_key(self, request: ApiRequest, presented: str) -> tuple[str, Key]:
        """Returns the id and the key for a presented one; raises Refusal, also for too many bad ones."""
        found = None if self._keyring is None else self._keyring.find(presented)
        if found is None:
            verdict = KeyCheck(None, None) if self._keyring is None else self._keyring.check_token(presented)
            raise self._unauthorized(request, verdict)
        return found

    def active_key(self, key_id: str) -> Key | None:
        """Returns the key of this id if it is valid now."""
        key = None if self._keyring is None else self._keyring.keys.get(key_id)
        return key if key is not None and key.state(datetime.now(UTC)) == "active" else None

    def admit_key(self, request: ApiRequest, key_id: str, key: Key) -> Principal:
        """Returns the principal of a request with this key; records the use and takes a token of the key's rate."""
        if self._keyring is not None:
            self._usage.record_use(key_id)
        if self._by_key is not None:
            _take(self._by_key, key_id, request)
        return Principal(key=key_id, scopes=frozenset(key.scopes), queues=key.queues, address=request.client)

    def check_scope(self, request: ApiRequest, caller: Principal, name: str, scope: KeyScope | None) -> None:
        """Refuses a principal without the scope of an operation."""
        if scope is None or caller.has_scope(scope):
            return
        self._emit_refused(request, caller.name, f"{name} needs the scope {scope}")
        header = (b"www-authenticate", f'Bearer error="insufficient_scope", scope="{scope}"'.encode())
        detail = f"this key lacks the scope {scope}"
        raise Refusal(403, "forbidden", detail, f"use a key with scope {scope}", header)

    def is_over_tls(self, scope: Mapping[str, Any]) -> bool:
        """Returns True if the client's connection is encrypted, here or by a trusted proxy."""
        return scope.get("scheme") == "https" or self._proxies.is_forwarded_tls(scope)

    def is_still_authorized(self, request: ApiRequest, caller: Principal) -> bool:
        """Returns True if the caller's key is still valid, with all scopes and queues that it had for this request."""
        if self._keyring is None:
            return True
        found = self._keyring.find(_presented_key(request))
        return found is not None and caller.scopes <= {*found[1].scopes} and {*caller.queues} <= {*found[1].queues}

    def _unauthorized(self, request: ApiRequest, judged: KeyCheck) -> Refusal:
        taken = self._refused.take(address_network(request.client))
        if not taken.allowed:
            return self._refused.rate_refusal(taken, "these are more refused keys than one address may show")
        self._emit_refused(request, judged.key_id or "anonymous", judged.problem or "the key became valid just now")
        return unauthorized_refusal()

    def _emit_refused(self, request: ApiRequest, who: str, problem: str) -> None:
        self._events.emit(KeyRefused(who=who, address=request.client, request_id=request.id, problem=problem))


def _rate(what: str, per_second: int | None, settings: Settings, app: Holdfast) -> Rate | None:
    return None if per_second is None else Rate(what, per_second, max(settings.rate_burst, 1), app.clock)


def _take(rate: Rate, name: str, request: ApiRequest) -> None:
    taken = rate.take(name)
    request.added += rate.rate_headers(taken)
    if not taken.allowed:
        raise rate.rate_refusal(taken)


def _presented_key(request: ApiRequest) -> str:
    """Returns the key that the request presents; "" if it presents none or several."""
    header, own = request.headers.get(b"authorization"), request.headers.get(b"x-api-key")
    if {b"authorization", b"x-api-key"} & request.repeated or (header is not None and own is not None):
        return ""
    if own is not None:
        return own.decode("latin-1")
    kind, _, key = (header or b"").partition(b" ")
    return key.strip(b" \t").decode("latin-1") if kind.lower() == b"bearer" else ""


_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_HEADERS = b"authorization, content-type, idempotency-key, last-event-id, x-api-key, x-request-id"
_EXPOSED = b"location, ratelimit, ratelimit-policy, retry-after, x-request-id"
_VARY: Header = (b"vary", b"origin")


class Origins:
    """CORS: origins whose pages may call the API; none by default."""

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

    def answer_preflight(self, request: ApiRequest) -> ApiResponse | None:
        """Returns the answer of a CORS preflight; None for other requests."""
        if request.method != "OPTIONS" or b"access-control-request-method" not in request.headers:
            return None
        if request.headers.get(b"origin") not in self._allowed:
            return None
        allow = (
            (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
            (b"access-control-allow-headers", _HEADERS),
            (b"access-control-max-age", b"600"),
        )
        return ApiResponse(204, headers=allow)

    def check_origin(self, request: ApiRequest) -> None:
        """Refuses a request of another site's page that may change data, by the headers that browsers send."""
        origin = request.headers.get(b"origin")
        if request.method in _SAFE_METHODS or origin in self._allowed:
            return
        site = request.headers.get(b"sec-fetch-site")
        if site is None:  # an older browser, or a program, which sends no Origin
            same = origin is None or origin.partition(b"://")[2] == request.headers.get(b"host")
        else:
            same = site in (b"none", b"same-origin")
        if not same:
            detail = "a page of another site may not change anything"
            raise Refusal(403, "cross_site", detail, "call from the same origin, or from outside a browser")
