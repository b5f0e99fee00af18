"""A browser without scripts: it keeps cookies, sends the forms of pages, and checks each page that it gets."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import httpx

from tests.web.client import Api

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
OWN = {"sec-fetch-site": "same-origin"}
FORM = {"content-type": "application/x-www-form-urlencoded"}
_SIGNATURE = re.compile(r"\.[0-9a-f]{16}$")
_TOKEN = re.compile(r'name="token" value="([0-9a-f]{64})"')


class Visitor:
    """Visits the console of an API in this process."""

    def __init__(self, api: Api, *, prefix: str = "", scheme: str = "http", site: Any = None) -> None:
        self._api = api
        self.prefix = prefix
        self.landed = ""
        transport = httpx.ASGITransport(site or api.served)
        self.client = httpx.AsyncClient(transport=transport, base_url=f"{scheme}://console.example")

    def ask(self, method: str, path: str, **provided: Any) -> httpx.Response:
        """Asks for a path below the console."""
        return self._api.run(self.client.request(method, f"{self.prefix}/console{path}", **provided))

    def open_page(self, path: str = "", status: int = 200, **headers: str) -> str:
        """Returns the text of a page; checks its form and its headers."""
        answer = self.ask("GET", path, headers=headers)
        assert answer.status_code == status, (path, answer.status_code, answer.headers.get("location"))
        check_page(answer, self.prefix)
        return answer.text

    def sign_in(self, key: str, wanted: str = "") -> httpx.Response:
        """Signs in; returns the answer."""
        return self.send("/sign-in", {"key": key, "next": wanted}, token=None)

    def token(self) -> str:
        """Returns the token of this session's forms."""
        found = _TOKEN.search(self.open_page("/limits"))
        assert found is not None
        return found[1]

    def token_of_sign_out(self) -> str:
        """The same for a key that may change nothing: its only form is the sign-out."""
        found = _TOKEN.search(self.open_page("/queues"))
        assert found is not None
        return found[1]

    def send(
        self, path: str, fields: dict[str, Any] | None = None, *, token: str | None = "", **headers: str
    ) -> httpx.Response:
        """Sends a form. ``token``: "" for that of the session, None for none."""
        given = dict(fields or {})
        if token is not None:
            given["token"] = token or self.token()
        content = urlencode(given, doseq=True)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, content=content, headers={**FORM, **OWN, **named})

    def preview(self, fields: dict[str, Any], status: int = 200) -> str:
        """Returns the page that counts the jobs which a change would hit."""
        return self.open_page(f"/bulk/preview?{urlencode(fields, doseq=True)}", status)

    def change_many(self, fields: dict[str, Any]) -> str:
        """Confirms a change of many jobs; returns its result, or the page that goes on."""
        answer = self.send("/bulk/run", fields)
        if answer.status_code != 303:
            return answer.text
        self.landed = answer.headers["location"].removeprefix(f"{self.prefix}/console")
        return self.open_page(self.landed)

    def act(self, path: str, fields: dict[str, Any] | None = None) -> str:
        """Sends a form; returns where it led, without the signature of the notice, which ``landed`` has."""
        answer = self.send(path, fields)
        assert answer.status_code == 303, answer.text
        self.landed = answer.headers["location"].removeprefix(f"{self.prefix}/console")
        return _SIGNATURE.sub("", self.landed)


def check_page(answer: httpx.Response, prefix: str = "") -> None:
    """Checks headers, links and elements of a page: nothing inline, nothing of other hosts."""
    headers = answer.headers
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers.get_list("content-security-policy") == [POLICY]
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
    assert (headers["referrer-policy"], headers["x-frame-options"]) == ("same-origin", "DENY")
    _Checker(prefix).feed(answer.text)


class _Checker(HTMLParser):
    """Fails on anything that a field of a job could have put into a page."""

    _LINKS = ("href", "src", "action", "hx-get", "hx-post", "formaction")

    def __init__(self, prefix: str) -> None:
        super().__init__(convert_charrefs=True)
        self._prefix = prefix

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        assert not {"style", "srcdoc"} & given.keys(), (tag, given)
        assert not [name for name in given if name.startswith(("on", "hx-on", "hx-vals", "hx-vars"))], (tag, given)
        assert tag != "script" or "/console/static/" in (given.get("src") or ""), given
        assert tag not in ("style", "iframe", "object", "embed", "base"), given
        assert tag != "img" or "/console/static/icon.svg" in (given.get("src") or ""), given
        for name in self._LINKS:
            value = given.get(name)
            assert value is None or value.startswith(("#", f"{self._prefix}/console")), (tag, name, value)
