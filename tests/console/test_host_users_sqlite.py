"""Users of the application around the console: its own sign-in decides who may see and change what."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from holdfast.core.errors import Invalid
from holdfast.web import ConsoleUser, create_app
from tests.console.visitor import Visitor
from tests.web.client import Api
from tests.web.keyed import Keys

USERS = {
    b"anna": ConsoleUser(name="anna@example.com", scopes=("read", "operate")),
    b"bert": ConsoleUser(name="bert"),
    b"carl": ConsoleUser(name="carl", scopes=("read", "operate"), queues=("mail",)),
}


async def find_user(scope: MutableMapping[str, Any]) -> ConsoleUser | None:
    """Returns the user of a header, as an application's own session would name one."""
    return USERS.get(dict(scope["headers"]).get(b"x-user", b""))


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def inner(home: str, audit: Path) -> Iterator[Api]:
    """An API without keys, and with an audit file."""
    with Api(home, audit_file=str(audit)) as api:
        yield api


def visit_as(inner: Api, name: str, find: Any = find_user, **options: Any) -> Visitor:
    """Returns a browser of this user in an application that has the console at ``/ops``."""
    site = Starlette(routes=[Mount("/ops", create_app(inner.app, console_user=find, **options))])
    visitor = Visitor(inner, prefix="/ops", site=site)
    visitor.client.headers["x-user"] = name
    return visitor


def test_user_of_the_application_needs_no_key(inner: Api, audit: Path) -> None:
    job_id = inner.submit(queue="mail")["id"]
    anna = visit_as(inner, "anna")
    assert "Sign out" not in anna.open_page()
    anna.act(f"/jobs/{job_id}/cancel")
    assert inner.get(f"/v1/jobs/{job_id}")["state"] == "cancelled"
    who = '"who":"user:anna@example.com"'
    records = [line for line in audit.read_text().splitlines() if "cancel_job" in line]
    assert [who in line for line in records] == [True, True]  # asked and done


def test_user_with_scope_read_changes_nothing(inner: Api) -> None:
    inner.submit(queue="mail")
    bert, anna = visit_as(inner, "bert"), visit_as(inner, "anna")
    assert "<form" not in bert.open_page("/queues")
    bert.client.cookies, token = anna.client.cookies, anna.token()
    answer = bert.send("/queues/mail/pause", token=token)
    assert answer.status_code == 403
    assert inner.get("/v1/queues/mail")["paused"] is False


def test_session_of_one_user_is_worth_nothing_to_another(inner: Api) -> None:
    inner.submit(queue="mail")
    anna = visit_as(inner, "anna")
    token = anna.token()
    anna.client.headers["x-user"] = "carl"
    answer = anna.send("/queues/mail/pause", token=token)
    assert (answer.status_code, "this form is not of your session" in answer.text) == (403, True)
    assert inner.get("/v1/queues/mail")["paused"] is False


def test_user_for_some_queues_sees_no_others(inner: Api) -> None:
    inner.submit(queue="mail")
    hidden = inner.submit(queue="vault")["id"]
    carl = visit_as(inner, "carl")
    page = carl.open_page("/queues")
    assert ("mail" in page, "vault" in page) == (True, False)
    assert carl.ask("GET", f"/jobs/{hidden}").status_code == 404


def test_without_a_user_the_console_asks_for_a_sign_in(inner: Api, home: str, tmp_path: Path) -> None:
    answer = visit_as(inner, "unknown").ask("GET", "")
    assert (answer.status_code, "has not signed you in" in answer.text) == (401, True)
    keys = Keys(tmp_path)
    with Api(home, keys_file=str(keys.path)) as keyed:
        visitor = visit_as(keyed, "unknown")
        assert visitor.ask("GET", "/queues").headers["location"] == "/ops/console/sign-in?next=%2Fqueues"
        visitor.sign_in(keys.spare)
        assert "Sign out" in visitor.open_page("/queues")
        visitor.client.headers["x-user"] = "bert"
        assert "<form" not in visitor.open_page("/queues")


def test_user_who_signs_out_there_is_out_here(inner: Api) -> None:
    anna = visit_as(inner, "anna")
    token = anna.token()
    del anna.client.headers["x-user"]
    assert anna.ask("GET", "/queues").status_code == 401
    assert anna.send("/queues/mail/pause", token=token).status_code == 401


def test_hook_may_be_a_plain_function(inner: Api) -> None:
    visitor = visit_as(inner, "anna", lambda scope: USERS[b"bert"])
    assert "<form" not in visitor.open_page("/queues")


@pytest.mark.parametrize(
    "given",
    [
        {"name": ""},
        {"name": "a\n"},
        {"name": "a", "scopes": ("view",)},
        {"name": "a", "queues": ("A B",)},
        {"name": "a", "queues": ()},
    ],
)
def test_user_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        ConsoleUser(**given)


@pytest.mark.parametrize("is_shared", [True, False])
def test_processes_with_one_file_of_keys_take_forms_of_each_other(home: str, tmp_path: Path, is_shared: bool) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    with Api(home, **({"keys_file": str(file)} if is_shared else {})) as inner:
        here, there = visit_as(inner, "anna"), visit_as(inner, "anna")
        token = here.token()
        there.client.cookies = here.client.cookies
        assert there.send("/queues/mail/pause", token=token).status_code == (303 if is_shared else 403)
