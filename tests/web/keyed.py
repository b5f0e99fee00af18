"""Keys for tests, in a file as `holdfast keys` makes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from holdfast.web.keys import Key, new_key, revoke_key
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

    def change(self, token: str, change: Callable[[Key], Key]) -> None:
        """Replaces a key in the file."""
        key_id = id_of(token)
        change_keys(self.path, lambda present: {**present, key_id: change(present[key_id])})


LOSSES: dict[str, Callable[[Key], Key]] = {
    "revoked": revoke_key,
    "queues": lambda key: replace(key, queues=("mail",)),
    "scopes": lambda key: replace(key, scopes=("submit",)),
}
"""Changes that leave a key less than it had, if it was for every queue, and not for submitting."""

loses = pytest.mark.parametrize("loss", LOSSES)


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
