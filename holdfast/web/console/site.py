"""The console as an application: access, sign-in, routes, and problems as pages."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.routing import compile_path
from starlette.types import Scope, Send

from holdfast.app import Holdfast
from holdfast.core.errors import NotFound
from holdfast.web.authentication import Authenticator
from holdfast.web.console import (
    ROOT,
    actions,
    batch_pages,
    bulk_pages,
    error_pages,
    job_pages,
    limit_pages,
    overview,
    schedule_pages,
    workflow_graph,
)
from holdfast.web.console.cached import (
    CachedRead,
    SharedRefreshes,
    has_fault_plan,
    read_failed_jobs,
    read_queues,
    read_running_jobs,
)
from holdfast.web.console.charts import SPANS, HistoryCharts
from holdfast.web.console.rendering import asset_response, html_response
from holdfast.web.console.sessions import BrowserSession, Sessions, expired_cookie
from holdfast.web.console.visit import (
    ConsoleParts,
    OperationOpener,
    OperationRunner,
    PageRoute,
    Visit,
    console_link,
    page_globals,
    read_pairs,
)
from holdfast.web.keys import ConsoleUser, FindUser, hash_token
from holdfast.web.messages import CHECK_ID, ApiRequest, ApiResponse, Refusal, read_form, send_answer
from holdfast.web.routing import Operation

_FORM_PAYLOADS = 4  # a form may be as long as so many payloads: it is percent-encoded
_MAX_SIGN_IN = 16_384  # bytes of a form
_HISTORY_FOR = 20.0  # seconds
_SIGN_IN = f"{ROOT}/sign-in"
_SIGN_OUT = f"{ROOT}/sign-out"
_UNSAVED = "You are not signed in: what you sent changed nothing. Copy it from the page before, then sign in."
_STATIC = f"{ROOT}/static/"
_LOCAL_PATH = re.compile(r"(?:/[A-Za-z0-9._~%:@-]+)*(?:\?[A-Za-z0-9._~%:@&=+*-]*)?")
_TITLES: Mapping[int | str, str] = {
    "too_broad": "The search took too long",
    401: "Sign in",
    403: "Not allowed",
    404: "Not found",
    409: "Not possible now",
    422: "Not understood",
    429: "Too many requests",
    503: "The store does not answer",
}


async def _sign_out(visit: Visit) -> ApiResponse:
    """Ends the session."""
    visit.console.sessions.end_session(visit.session)
    return visit.redirect_to("sign-in")


ROUTES = (
    *overview.ROUTES,
    *job_pages.ROUTES,
    *workflow_graph.ROUTES,
    *error_pages.ROUTES,
    *bulk_pages.ROUTES,
    *schedule_pages.ROUTES,
    *limit_pages.ROUTES,
    *batch_pages.ROUTES,
    *actions.ROUTES,
    PageRoute("POST", _SIGN_OUT, _sign_out),
)
"""All pages and actions behind the sign-in."""


class Console:
    """The console of one ``Api``.

    ``open_operation`` and ``run_operation``: of the API, so that pages have its checks and its audit records.
    ``is_local``: it may be used without keys, as no other host reaches it. ``find_user``: finds the person whom the
    application around it has signed in.
    """

    def __init__(
        self,
        app: Holdfast,
        operations: Sequence[Operation],
        authenticator: Authenticator,
        open_operation: OperationOpener,
        run_operation: OperationRunner,
        *,
        is_local: bool,
        find_user: FindUser | None,
    ) -> None:
        keys_file = app.settings.keys_file
        self.authenticator = authenticator
        self.sessions = Sessions(authenticator, None if keys_file is None else Path(keys_file))
        self._parts = ConsoleParts(
            app=app,
            sessions=self.sessions,
            queues=CachedRead(app, read_queues),
            running=CachedRead(app, read_running_jobs),
            failed=CachedRead(app, read_failed_jobs),
            has_faults=CachedRead(app, has_fault_plan),
            charts={span: _chart_cache(app, span) for span in SPANS},
            refreshes=SharedRefreshes(app),
            operations={each.name: each for each in operations},
            open_operation=open_operation,
            run_operation=run_operation,
        )
        self._body_timeout = app.settings.body_timeout.total_seconds()
        self._max_form = app.settings.payload_limit * _FORM_PAYLOADS
        self._find_user = find_user
        self._is_on = authenticator.has_keys or is_local or find_user is not None
        self._routes = [(compile_path(route.path)[0], route) for route in ROUTES]

    async def __call__(self, scope: Scope, request: ApiRequest, send: Send) -> None:
        """Answers a request below ``/console``."""
        request.show_problem = partial(problem_page, request, page_globals(request))
        await send_answer(send, request, await self._answer(scope, request))

    async def _answer(self, scope: Scope, request: ApiRequest) -> ApiResponse:
        path = request.path.rstrip("/")
        if not self._is_on:
            remedy = "name a keys_file (`holdfast keys create` makes keys), or use `holdfast dev` on this host"
            raise Refusal(404, "console_off", "the console is off: this API has no keys", remedy)
        if path.startswith(_STATIC) and request.method in ("GET", "HEAD"):
            request.template = f"{_STATIC}{{file}}"
            return asset_response(path.removeprefix(_STATIC), dict(read_pairs(request)).get("v", ""))
        is_secure = self.authenticator.is_over_tls(scope)
        user = await self._read_user(scope)
        if path == _SIGN_IN and self.authenticator.has_keys and user is None:
            request.template = _SIGN_IN
            return await self._sign_in(request, is_secure=is_secure)
        session = self.sessions.find_session(request, user, is_secure=is_secure)
        if session is None and user is None:
            if self.authenticator.has_keys:
                return self._ask_to_sign_in(request)
            if self._find_user is not None:
                detail = "the application to which this console belongs has not signed you in"
                raise Refusal(401, "not_signed_in", detail, "sign in there, then come back")
        is_new = session is None
        session = session or self.sessions.new_session(user=user)
        return await self._visit(request, path, session, is_new=is_new, is_secure=is_secure)

    async def _read_user(self, scope: Scope) -> ConsoleUser | None:
        """Returns the user whom the application around the console has signed in."""
        found = None if self._find_user is None else self._find_user(scope)
        return await found if isinstance(found, Awaitable) else found

    # ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────
    async def _visit(
        self, request: ApiRequest, path: str, session: BrowserSession, *, is_new: bool, is_secure: bool
    ) -> ApiResponse:
        """Runs a page or an action for a session. ``is_new``: the browser does not have it yet."""
        caller = self.sessions.authorize_session(request, session)
        visit = Visit(self._parts, request, session, caller, {})
        request.show_problem = partial(problem_page, request, visit.common_context())
        route, parts = self._find_route(request, path)
        request.template = route.path
        if route.method == "POST":
            form = await self._read_form(request)
            visit = Visit(self._parts, request, session, caller, parts, form)
            if is_new or not self.sessions.is_form_token(session, visit.form_value("token")):
                raise Refusal(403, "stale_form", "this form is not of your session", "reload the page, and try again")
        else:
            is_refresh = not is_new and request.headers.get(b"hx-trigger") == b"live"
            visit = Visit(self._parts, request, session, caller, parts, is_refresh=is_refresh)
        cookie_path = console_link(request)
        if route.path == _SIGN_OUT:
            visit.headers.append(expired_cookie(request, cookie_path, is_secure=is_secure))
        elif is_new or (not visit.is_refresh and self.sessions.is_renewable(session)):
            renewed = self.sessions.renew_session(session)
            visit.headers.append(self.sessions.session_cookie(renewed, request, cookie_path, is_secure=is_secure))
        if not visit.is_refresh:
            if route.method == "GET" and not self._parts.app.settings.allow_faults:
                await self._parts.has_faults.read_value()  # for the menu
            return await route.handler(visit)
        own = session.id if {"notice", "result"} & dict(read_pairs(request)).keys() else ""  # signed for this session
        key = request.root_path, request.path, request.query, caller.scopes, caller.queues, own
        form_token = self.sessions.form_token(session)
        return await self._parts.refreshes.find_answer(key, lambda: route.handler(visit), form_token)

    def _find_route(self, request: ApiRequest, path: str) -> tuple[PageRoute, Mapping[str, str]]:
        methods = []
        for pattern, route in self._routes:
            found = pattern.match(path)
            if found is None:
                continue
            if route.method == ("GET" if request.method == "HEAD" else request.method):
                return route, {name: unquote(value) for name, value in found.groupdict().items()}
            methods.append(route.method)
        if methods:
            allow = (b"allow", ", ".join(methods).encode())
            raise Refusal(405, "method_not_allowed", "that is not possible here", f"use {methods[0]}", allow)
        raise Refusal(404, "unknown_path", "there is no such page", "start at the overview")

    async def _read_form(self, request: ApiRequest) -> list[tuple[str, str]]:
        check_same_site(request)
        return await read_form(request, self._max_form, self._body_timeout)

    # ── sign-in ───────────────────────────────────────────────────────────────────────────────────────────────
    def _ask_to_sign_in(self, request: ApiRequest) -> ApiResponse:
        """Redirects to the sign-in; a page that refreshes itself is left by its script. A form gets the sign-in as its
        answer: the browser keeps what was typed on the page before."""
        is_page = request.method in ("GET", "HEAD")
        if not is_page and request.path.rstrip("/") != _SIGN_OUT:
            return html_response(401, "sign_in.html", {**page_globals(request), "next": "", "error": _UNSAVED})
        wanted = request.path.removeprefix(ROOT) + (f"?{request.query.decode('latin-1')}" if request.query else "")
        pairs = [("next", wanted)] if is_page and local_path(wanted) else []
        location = console_link(request, "sign-in", pairs).encode()
        if b"hx-request" in request.headers:
            return ApiResponse(401, headers=((b"hx-redirect", location),))
        return ApiResponse(303, headers=((b"location", location),))

    async def _sign_in(self, request: ApiRequest, *, is_secure: bool) -> ApiResponse:
        context = {**page_globals(request), "next": "", "error": ""}
        if request.method in ("GET", "HEAD"):
            return html_response(
                200, "sign_in.html", {**context, "next": local_path(dict(read_pairs(request)).get("next", ""))}
            )
        if request.method != "POST":
            raise Refusal(405, "method_not_allowed", "that is not possible here", "use GET", (b"allow", b"GET, POST"))
        check_same_site(request)
        form = dict(await read_form(request, _MAX_SIGN_IN, self._body_timeout))
        context["next"] = local_path(form.get("next", ""))
        try:
            key_id, _ = self.authenticator.identify_key(request, form.get("key", "").strip())
        except Refusal as refusal:
            error = refusal.detail if refusal.status == 429 else "This key is not valid."
            headers = [each for each in refusal.headers if each[0] != b"www-authenticate"]
            return html_response(refusal.status, "sign_in.html", {**context, "error": error}, *headers)
        session = self.sessions.new_session(key_id, hash_token(form["key"].strip()))
        cookie = self.sessions.session_cookie(session, request, console_link(request), is_secure=is_secure)
        target = console_link(request) + local_path(form.get("next", ""))
        return ApiResponse(303, headers=((b"location", target.encode()), cookie))


def local_path(text: str) -> str:
    """Returns a path of the console that a link may name; "" for anything else, so that no link leads elsewhere."""
    return text if _LOCAL_PATH.fullmatch(text) and ".." not in unquote(text) else ""


def _chart_cache(app: Holdfast, span: str) -> CachedRead[HistoryCharts]:
    """Returns the shared read of the history of ended jobs, which sweeps count once a minute."""

    async def read_charts(app: Holdfast) -> HistoryCharts:
        return HistoryCharts(await app.read_history(span), span)

    return CachedRead(app, read_charts, fresh_for=_HISTORY_FOR)


def check_same_site(request: ApiRequest) -> None:
    """Refuses a form that a page of another origin sends, by the headers of browsers. A form without any is refused."""
    site = request.headers.get(b"sec-fetch-site")
    origin = request.headers.get(b"origin", b"")
    host = request.headers.get(b"host")
    is_own = site == b"same-origin" if site is not None else origin.partition(b"://")[2] == host
    if not is_own or {b"origin", b"sec-fetch-site"} & request.repeated:
        detail = "a page of another site may not change anything"
        if site is None and not origin:
            detail = "the request has neither Sec-Fetch-Site nor Origin, and so no page is known to have sent it"
        raise Refusal(403, "cross_site", detail, "use the form of the console; programs use the API")


def problem_page(request: ApiRequest, context: Mapping[str, Any], answer: ApiResponse) -> ApiResponse:
    """Returns a problem document as a page, with its remedy."""
    problem: dict[str, Any] = msgspec.json.decode(answer.body)
    given = {
        **context,
        "status": answer.status,
        "is_page": request.method in ("GET", "HEAD"),
        "title": _TITLES.get(problem["code"]) or _TITLES.get(answer.status, "Something went wrong"),
        "detail": problem["detail"],
        "remedy": CHECK_ID if problem["code"] == NotFound.code else problem.get("remedy", ""),
        "request_id": problem["request_id"],
    }
    return html_response(answer.status, "problem.html", given, *answer.headers)
