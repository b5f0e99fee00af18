"""Templates and static files of the console."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from holdfast.core.encryption import MARKER, describe_encrypted
from holdfast.core.errors import NotFound
from holdfast.views.formatting import UNSAFE, format_memory, format_span, safe_text
from holdfast.web.console.wording import describe_reason, describe_state
from holdfast.web.messages import ApiResponse, Header

HTML = b"text/html; charset=utf-8"
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
PAGE_HEADERS: tuple[Header, ...] = (
    (b"content-security-policy", POLICY),
    (b"referrer-policy", b"same-origin"),  # with no-referrer browsers send forms without their origin
    (b"vary", b"cookie"),
)
MAX_SHOWN = 20_000
"""Characters of a payload or a result on a page."""
MAX_LINE = 2_000
"""Characters of a log line on a page."""
_MEDIA = MappingProxyType(
    {
        "console.css": b"text/css; charset=utf-8",
        "console.js": b"text/javascript; charset=utf-8",
        "htmx.min.js": b"text/javascript; charset=utf-8",
        "idiomorph-ext.min.js": b"text/javascript; charset=utf-8",
        "icon.svg": b"image/svg+xml",
    }
)


def html_response(status: int, template: str, context: Mapping[str, Any], *headers: Header) -> ApiResponse:
    """Returns a page."""
    text = _environment().get_template(template).render(context)
    return ApiResponse(status, text.encode(), HTML, (*PAGE_HEADERS, *headers))


# ── static files ──────────────────────────────────────────────────────────────────────────────────────────────────
@cache
def _content(name: str) -> bytes:
    return files("holdfast.web.console").joinpath("static", name).read_bytes()


@cache
def asset_version(name: str) -> str:
    """Returns a short digest of a static file: a new release has new addresses."""
    return hashlib.sha256(_content(name)).hexdigest()[:12]


def asset_response(name: str, version: str) -> ApiResponse:
    """Returns a static file. Browsers may keep it if they ask for its version: else it may be that of another one."""
    if name not in _MEDIA:
        raise NotFound("there is no such file")
    is_own = version == asset_version(name)
    cached = (b"cache-control", b"public, max-age=31536000, immutable" if is_own else b"no-cache")
    return ApiResponse(200, _content(name), _MEDIA[name], (cached, (b"content-security-policy", b"default-src 'none'")))


# ── Jinja2 ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _find_field(environment: Environment, obj: Any, attribute: str) -> Any:
    """Returns what ``queue.name`` is: the field of a document, or an attribute. Jinja2 looks the other way round."""
    return (
        obj[attribute] if type(obj) is dict and attribute in obj else Environment.getattr(environment, obj, attribute)
    )


class _Environment(Environment):
    getattr = _find_field


@cache
def _environment() -> Environment:
    """Returns the environment: every value is escaped, control and bidirectional characters are made visible."""
    environment = _Environment(
        loader=PackageLoader("holdfast.web.console", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters |= {
        "ago": format_age,
        "memory": format_memory,
        "span": lambda seconds: "–" if seconds is None else format_span(seconds),
        "number": lambda value: f"{value:,}",
        "json": pretty_json,
        "query": lambda pairs: urlencode(pairs, doseq=True),
        "clip": clip_line,
        "moment": lambda text: text[:19].replace("T", " ") if text else "–",
        "compact": compact_json,
        "local": lambda text: datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M"),
        "field": form_value,
        "fingerprint": fingerprint_value,
        "cut": cut_text,
        "json_field": json_field,
        "meaning": describe_state,
        "reason": describe_reason,
        "short": lambda text: f"{text[:8]}…{text[-6:]}",
    }
    return environment


def _visible(value: Any) -> Any:
    if value is None:
        return ""
    return safe_text(value, lines=True) if isinstance(value, str) and not isinstance(value, Markup) else value


def form_value(value: Any) -> Markup:
    """Returns a value for a form field, as it is: what the browser sends back must be the same."""
    return escape(value)


def fingerprint_value(value: Any) -> str:
    """Returns a short text that stands for a JSON value: a form says with it what it has shown."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def json_field(value: Any) -> Markup:
    """Returns a value as JSON for a form field; characters that hide or reorder text are escaped as JSON has it."""
    text = pretty_json(value)
    return escape(UNSAFE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text))


def cut_text(text: str, limit: int = MAX_LINE) -> str:
    """Returns the beginning of a long text."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters)"


def compact_json(value: Any) -> str:
    """Returns a value as JSON in one line; a placeholder for an encrypted one, nothing for None."""
    return "" if value is None else _placeholder(value) or json.dumps(value, ensure_ascii=False)


def _placeholder(value: Any) -> str | None:
    """Returns the placeholder of an encrypted value, also of a signal; None for any other."""
    inner = value.get("signal", value) if isinstance(value, dict) else value
    if not isinstance(inner, dict) or MARKER not in inner:
        return None
    return describe_encrypted(json.dumps(inner))


def pretty_json(value: Any) -> str:
    """Returns a value as indented JSON, cut after many characters; a placeholder for an encrypted one."""
    if (placeholder := _placeholder(value)) is not None:
        return placeholder
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "\n… cut here; the HTTP API returns all of it"


def clip_line(text: str | None, limit: int = 120) -> str:
    """Returns the first line of a text, at most ``limit`` characters."""
    first = (text or "").strip().split("\n", 1)[0]
    return first if len(first) <= limit else first[: limit - 1] + "…"


def format_age(text: str | None) -> str:
    """Returns the distance of an RFC 3339 instant from now: "5m ago", "in 2h"."""
    if not text:
        return "–"
    seconds = (datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()
    if abs(seconds) < 1:
        return "now"
    span = format_span(float(round(abs(seconds))))
    return f"{span} ago" if seconds > 0 else f"in {span}"
