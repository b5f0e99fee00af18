"""A request of a page: its principal and session, operations of the API run for it, and its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from holdfast.app import Holdfast
from holdfast.core.errors import Conflict, Invalid, NotFound
from holdfast.core.models import QueueInfo
from holdfast.tasks.codec import RawText, decode_json
from holdfast.web.console import ROOT
from holdfast.web.console.cached import CachedRead, FailedJobs, RunningJobs, SharedRefreshes
from holdfast.web.console.charts import HistoryCharts
from holdfast.web.console.rendering import asset_version, fingerprint_value, html_response
from holdfast.web.console.sessions import BrowserSession, Sessions
from holdfast.web.fields import read_query
from holdfast.web.keys import Principal
from holdfast.web.messages import ApiRequest, ApiResponse, Header
from holdfast.web.routing import Operation, RequestContext

_NAMED_ON_PAGE = 100
NOTICES = {
    "cancelled": "The job is cancelled, or was asked to stop.",
    "replayed": "The job is queued again.",
    "deleted": "The job is deleted.",
    "edited": "The job is changed.",
    "unchanged": "Nothing was changed: the values are those that there were.",
    "batch_cancelled": "The batch is cancelled. Its jobs go on.",
    "members_cancelled": "The jobs of the batch are cancelled, or were asked to stop.",
    "members_replayed": "The dead and cancelled jobs of the batch are queued again.",
    "members_kept": "No job of the batch was changed: none has a state that allows it, with its unique key free.",
    "members_refused": "Some jobs of the batch were changed; others have another state now, or lost their unique key.",
    "copied": "This is a new job, a copy of the other one.",
    "queue_paused": "The queue is paused. Running jobs go on.",
    "queue_resumed": "The queue is resumed.",
    "stopping": "The worker was asked to stop. It finishes its jobs within its grace.",
    "draining": "The worker was asked to drain: it empties its queues, then stops.",
    "schedule_paused": "The schedule is paused.",
    "schedule_resumed": "The schedule is resumed. It goes on with its next run.",
    "schedule_added": "The schedule is added.",
    "schedule_changed": "The schedule is changed. It keeps its count.",
    "schedule_removed": "The schedule is removed; its jobs stay. One that code declares returns when a worker starts.",
    "backfilled": "The jobs of these runs are submitted.",
    "limit_added": "The limit is added. It holds at once.",
    "limit_removed": "The limit is removed. One that code declares returns when a worker starts.",
    "limit_changed": "The limit is changed. It holds at once.",
    "limit_reset": "The limit has the values of the code again.",
    "limit_paused": "The limit is paused: no job starts under it.",
    "limit_resumed": "The limit is resumed.",
    "faults_stopped": "Faults are off.",
    "submitted": "The schedule has submitted this job.",
    "unsubmitted": "Nothing was submitted: this job has the unique key of the schedule's job.",
}
"""Texts that a redirect may name: the address carries a name that the session has signed."""


OperationOpener = Callable[[ApiRequest, Principal, Callable[[], bool], Mapping[str, str], Operation], RequestContext]
OperationRunner = Callable[[RequestContext, Operation, Callable[[], Awaitable[None]]], Awaitable[ApiResponse]]


class ConsoleParts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the API that pages use."""

    app: Holdfast
    sessions: Sessions
    queues: CachedRead[Sequence[QueueInfo]]
    running: CachedRead[RunningJobs]
    failed: CachedRead[FailedJobs]
    has_faults: CachedRead[bool]
    charts: Mapping[str, CachedRead[HistoryCharts]]
    refreshes: SharedRefreshes
    operations: Mapping[str, Operation]
    open_operation: OperationOpener
    run_operation: OperationRunner

    def shows_faults(self, caller: Principal) -> bool:
        """Returns True if the menu has the faults: some are on, or these settings allow them."""
        return not caller.is_restricted and bool(self.app.settings.allow_faults or self.has_faults.known_value)

    def forget_values(self) -> None:
        """Reads and renders anew what a change may have changed."""
        for each in (self.queues, self.running, self.failed, self.has_faults):
            each.forget_value()
        self.refreshes.forget_answers()


class Visit:
    """A request of the console, as a page sees it. ``is_refresh``: its answer is for all sessions with these rights."""

    def __init__(
        self,
        console: ConsoleParts,
        request: ApiRequest,
        session: BrowserSession,
        caller: Principal,
        path: Mapping[str, str],
        form: Sequence[tuple[str, str]] = (),
        *,
        is_refresh: bool = False,
    ) -> None:
        self.console = console
        self.request = request
        self.session = session
        self.caller = caller
        self.path = path
        self.form = form
        self.is_refresh = is_refresh
        self.headers: list[Header] = []
        self.answered = 0
        """The status of the last operation."""

    # ── input ─────────────────────────────────────────────────────────────────────────────────────────────────
    def form_value(self, name: str) -> str:
        """Returns the trimmed value of a form field; "" if it is missing."""
        return next((value.strip() for field, value in self.form if field == name), "")

    def changed_values(self, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a form that differ from what it showed, and from the stored ones. Raises Conflict if
        one of these is no longer stored as it was shown."""
        shown, now = self._shown_values, {name: fingerprint_value(stored[name]) for name in wanted}
        changed = [
            name for name, value in wanted.items() if fingerprint_value(value) not in (now[name], shown.get(name))
        ]
        self.check_shown({name: stored[name] for name in changed})
        return {name: wanted[name] for name in changed}

    def check_shown(self, stored: Mapping[str, Any]) -> None:
        """Raises Conflict if one of these stored values is not the one that the form showed."""
        shown = self._shown_values
        if stale := [name for name in stored if shown.get(name, now := fingerprint_value(stored[name])) != now]:
            what = " and ".join(stale)
            raise Conflict(f"{what} changed after this form was opened: nothing was saved; open the page again")

    @property
    def _shown_values(self) -> dict[str, str]:
        """Returns the fingerprints of the values that the form showed."""
        pairs = (each.partition(":") for each in self.form_value("shown").split())
        return {name: mark for name, _, mark in pairs}

    # ── operations ────────────────────────────────────────────────────────────────────────────────────────────
    async def call_operation(
        self, name: str, query: Sequence[tuple[str, str]] = (), body: Mapping[str, Any] | None = None, **path: str
    ) -> Any:
        """Runs an operation of the API as this principal, with its checks and its audit records; returns its document.

        Raises Refusal and HoldfastError as the API answers them.
        """
        operation = self.console.operations[name]
        call = self.make_context(name, path)

        async def read_input() -> None:
            call.query = read_query(urlencode(query).encode(), operation.query)
            if operation.body is not None:
                call.body = operation.body.read(body or {})

        try:
            answer = await self.console.run_operation(call, operation, read_input)
        except NotFound:
            if "job_id" in path:
                raise NotFound("there is no such job") from None  # the same for each reference
            raise
        self.answered = answer.status
        return decode_json(answer.body) if answer.body else None

    async def read_named_page(self, operation: str, kind: str) -> dict[str, Any]:
        """Returns a page of named things, and the name that the next page follows."""
        after = dict(read_pairs(self.request)).get("after", "")
        query = [("limit", str(_NAMED_ON_PAGE)), *([("after", after)] if after else [])]
        found = (await self.call_operation(operation, query))[kind]
        following = found[-1]["name"] if len(found) == _NAMED_ON_PAGE else None
        return {kind: found, "after": after, "following": following}

    async def visible_queues(self) -> list[QueueInfo]:
        """Returns the queues that the principal may see; raises Refusal without the scope read."""
        caller = self.make_context("list_queues", {}).caller
        return [each for each in await self.console.queues.read_value() if caller.allows_queue(each.name)]

    def make_context(self, name: str, path: Mapping[str, str]) -> RequestContext:
        """Returns the context of an operation; raises Refusal if the principal lacks its scope."""
        console = self.console
        return console.open_operation(
            self.request, self.caller, lambda: console.sessions.is_valid(self.session), path, console.operations[name]
        )

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────────────
    def link_to(self, path: str = "", query: Sequence[tuple[str, str]] = ()) -> str:
        """Returns the address of a page of the console, below the path where the API is mounted."""
        return console_link(self.request, path, query)

    def render_page(self, template: str, status: int = 200, **context: Any) -> ApiResponse:
        """Returns a page inside the common layout."""
        return html_response(status, template, {**self.common_context(), **context}, *self.headers)

    def redirect_to(
        self, path: str, notice: str = "", query: Sequence[tuple[str, str]] = (), *, is_change: bool = True
    ) -> ApiResponse:
        """Returns a redirect to a page of the console, usually after a change."""
        if is_change:
            self.console.forget_values()
        pairs = [*query, ("notice", self.console.sessions.sign_notice(self.session, notice))] if notice else query
        location = (b"location", self.link_to(path, pairs).encode())
        return ApiResponse(303, headers=(location, *self.headers))

    def form_token(self) -> str:
        """Returns the token of the forms; of a shared answer the one that stands for it."""
        console = self.console
        return console.refreshes.form_token if self.is_refresh else console.sessions.form_token(self.session)

    def common_context(self) -> dict[str, Any]:
        """Returns the names that the templates of a session know."""
        caller = self.caller
        notice = dict(read_pairs(self.request)).get("notice", "")
        return {
            **page_globals(self.request),
            "caller": caller,
            "can_operate": caller.has_scope("operate"),
            "can_submit": caller.has_scope("submit"),
            "shows_faults": self.console.shows_faults(caller),
            "form_token": self.form_token(),
            "is_refresh": self.is_refresh,
            "is_signed_in": self.session.key_id is not None,
            "notice": NOTICES.get(self.console.sessions.read_notice(self.session, notice)),
        }


Handler = Callable[[Visit], Awaitable[ApiResponse]]


class PageRoute(msgspec.Struct, frozen=True):
    """A page or an action of the console. Its path has names in braces."""

    method: str
    path: str
    handler: Handler


def page_globals(request: ApiRequest) -> dict[str, Any]:
    """Returns the names that every template knows, also without a session."""
    return {
        "link": lambda path="", query=(): console_link(request, path, query),
        "segment": lambda text: quote(text, safe=""),
        "asset": lambda name: f"{console_link(request, f'static/{name}')}?v={asset_version(name)}",
        "link_here": console_link(request, request.path.removeprefix(ROOT).strip("/"), _own_query(request)),
        "path": request.path,
        "section": request.path.removeprefix(ROOT).strip("/").partition("/")[0],
        "is_signed_in": False,
        "is_refresh": False,
        "notice": None,
        "caller": None,
    }


def _own_query(request: ApiRequest) -> list[tuple[str, str]]:
    """Returns the query of the page without its notice; nothing of a query that cannot be read."""
    try:
        return [pair for pair in read_pairs(request) if pair[0] != "notice"]
    except Invalid:
        return []


def console_link(request: ApiRequest, path: str = "", query: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the address of a page of the console."""
    address = quote(request.root_path, safe="/%:@") + ROOT + (f"/{path}" if path else "")
    return f"{address}?{urlencode(query)}" if query else address


def read_pairs(request: ApiRequest) -> list[tuple[str, str]]:
    """Returns the pairs of the query, empty values left out."""
    try:
        return parse_qsl(request.query.decode("ascii"), errors="strict", max_num_fields=100)
    except ValueError:
        shown = RawText(f"{len(request.query):,} bytes")
        raise Invalid("query", shown, "percent-encode UTF-8, with at most 100 values") from None
