"""Keys for tests, in a file as `holdfast keys` makes it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from holdfast.web.keys import new_key
from holdfast.web.keys_file import change_keys
from tests.web.client import JSON, Api


class Keys:
    """A file of keys."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.toml"
        self.spare = self.make("admin")
        """The whole of a key for everything."""

    def make(self, *scopes: str, queues: tuple[str, ...] = (), expires_at: datetime | None = None) -> str:
        """The whole of a new key."""
        key_id, key, token = new_key("a test's", scopes, queues, expires_at)
        change_keys(self.path, lambda present: {**present, key_id: key})
        return token

    def change(self, token: str, **fields: Any) -> None:
        """Gives fields of a key other values."""
        key_id = id_of(token)
        change_keys(self.path, lambda present: {**present, key_id: msgspec.structs.replace(present[key_id], **fields)})


NARROWED: list[dict[str, Any]] = [{"queues": ("mail",)}, {"scopes": ("submit",)}]
"""Fields that leave a key less than it had, if it was for every queue, and not for submitting."""


def id_of(token: str) -> str:
    """A key's id."""
    return token.split("_")[1]


def ask(api: Api, token: str | None, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    """Ask with this key."""
    shown = {} if token is None else {"authorization": f"Bearer {token}"}
    content = None if body is None else json.dumps(body)
    given = JSON if body is not None else {}
    return api.ask(method, path, content=content, headers={**given, **shown, **headers})


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem of an answer that refuses so."""
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), answer.text
    return problem
