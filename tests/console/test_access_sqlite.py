"""Access to the console: keys, sessions, sign-in and sign-out."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from holdfast import Holdfast
from holdfast.core.errors import ConfigError
from holdfast.web import create_app
from holdfast.web.console import sessions
from holdfast.web.keys import revoke_key, rotate_key
from holdfast.web.keys_file import change_keys
from tests.console.visitor import OWN, Visitor, check_page
from tests.support.servers import until
from tests.web.client import Api
from tests.web.keyed import Keys, id_of

PAGES = (
    "",
    "/jobs",
    "/errors",
    "/errors/0123456789ab",
    "/queues",
    "/workers",
    "/schedules",
    "/limits",
    "/batches",
    "/faults",
    "/jobs/key:x",
    "/nothing",
)
HOUR = 3600


def test_console_is_off_without_keys(home: str) -> None:
    with Api(home) as api:
        for path in (*PAGES, "/sign-in", "/static/console.css"):
            answer = Visitor(api).ask("GET", path)
            assert (answer.status_code, "keys_file" in answer.text) == (404, True)
            check_page(answer)


def test_local_console_needs_no_sign_in(home: str) -> None:
    with Api(home) as api:
        visitor = Visitor(api, site=create_app(api.app, local_console=True))
        assert "All is well" in visitor.open_page()
        assert visitor.send("/queues/mail/pause").status_code == 303
        assert "Resume" in visitor.open_page("/queues")


@pytest.mark.parametrize("path", PAGES)
def test_page_without_session_leads_to_sign_in(api: Api, path: str) -> None:
    answer = Visitor(api).ask("GET", path)
    wanted = f"?next={path.replace('/', '%2F').replace(':', '%3A')}" if path else ""
    assert (answer.status_code, answer.headers["location"]) == (303, f"/console/sign-in{wanted}")


def test_form_without_session_is_refused_and_says_that_nothing_changed(api: Api, keys: Keys) -> None:
    unknown = Visitor(api)
    answer = unknown.send("/queues/mail/pause", token="0" * 64)
    check_page(answer)
    assert (answer.status_code, "location" in answer.headers) == (401, False)
    assert 'name="key"' in answer.text
    assert "what you sent changed nothing" in answer.text
    left = unknown.send("/sign-out", token="0" * 64)
    assert (left.status_code, left.headers["location"]) == (303, "/console/sign-in")
    unknown.sign_in(keys.spare)
    assert ">paused<" not in unknown.open_page("/queues")


def test_refresh_without_session_leaves_the_page(api: Api) -> None:
    answer = Visitor(api).ask("GET", "/jobs", headers={"hx-request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/console/sign-in?next=%2Fjobs")


def test_sign_in_sets_a_cookie_and_leads_back(api: Api, keys: Keys) -> None:
    visitor = Visitor(api)
    visitor.open_page("/sign-in?next=/jobs%3Fstate%3Ddead")
    answer = visitor.sign_in(keys.spare, "/jobs?state=dead")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs?state=dead")
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name.startswith("holdfast_console=" + id_of(keys.spare))
    assert attributes == ["Path=/console", "Max-Age=28800", "HttpOnly", "SameSite=Lax"]
    assert keys.spare.split("_")[2] not in answer.headers["set-cookie"]
    assert "Sign out" in visitor.open_page()


@pytest.mark.rows("X07")
def test_cookie_is_bound_to_the_host_behind_tls(api: Api, keys: Keys) -> None:
    visitor = Visitor(api, scheme="https")
    name, *attributes = visitor.sign_in(keys.spare).headers["set-cookie"].split("; ")
    assert name.startswith("__Host-holdfast_console=")
    assert attributes == ["Path=/", "Secure", "Max-Age=28800", "HttpOnly", "SameSite=Lax"]
    assert "Sign out" in visitor.open_page()


def test_ports_of_a_host_have_cookies_of_their_own(api: Api, keys: Keys) -> None:
    visitor = Visitor(api)
    headers = {"host": "console.example:8001"}
    answer = visitor.send("/sign-in", {"key": keys.spare}, token=None, **headers)
    assert answer.headers["set-cookie"].startswith("holdfast_console_8001=")
    cookie = answer.headers["set-cookie"].partition(";")[0]
    assert Visitor(api).ask("GET", "", headers={**headers, "cookie": cookie}).status_code == 200
    assert Visitor(api).ask("GET", "", headers={"cookie": cookie}).status_code == 303


def test_consoles_of_one_host_behind_tls_have_cookies_of_their_own(api: Api, keys: Keys) -> None:
    site = Starlette(routes=[Mount("/a", api.served), Mount("/b", api.served), Mount("/", api.served)])
    names = set()
    visitors = [Visitor(api, prefix=prefix, scheme="https", site=site) for prefix in ("", "/a", "/b")]
    for visitor in visitors:
        visitor.client.cookies = visitors[0].client.cookies
        names.add(visitor.sign_in(keys.spare).headers["set-cookie"].partition("=")[0])
    for visitor in visitors:
        visitor.open_page()
    assert len(names) == 3
    assert {name[:23] for name in names} == {"__Host-holdfast_console"}
    headers = {"host": "console.example:8443"}
    answer = visitors[0].send("/sign-in", {"key": keys.spare}, token=None, **headers)
    assert answer.headers["set-cookie"].startswith("__Host-holdfast_console_8443=")


def test_plain_cookie_is_not_accepted_behind_tls(api: Api, keys: Keys, visitor: Visitor) -> None:
    [cookie] = visitor.client.cookies.jar
    answer = Visitor(api, scheme="https").ask("GET", "", headers={"cookie": f"{cookie.name}={cookie.value}"})
    assert answer.status_code == 303


@pytest.mark.parametrize("proto", ["https", "http"])
def test_trusted_proxy_says_if_its_client_speaks_tls(home: str, keys: Keys, proto: str) -> None:
    with Api(home, keys_file=str(keys.path), trusted_proxies=["127.0.0.1"]) as api:
        answer = Visitor(api).send("/sign-in", {"key": keys.spare}, token=None, x_forwarded_proto=proto)
    assert answer.headers["set-cookie"].startswith("__Host-") is (proto == "https")


@pytest.mark.parametrize(
    "wanted",
    [
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "\\evil",
        "/..//evil.example",
        "/%2e%2e/x",
        "/jobs\r\nset-cookie: a=b",
        "javascript:alert(1)",
        "@evil.example",
        ".evil.example",
    ],
)
def test_sign_in_leads_to_no_other_place(api: Api, keys: Keys, wanted: str) -> None:
    answer = Visitor(api).sign_in(keys.spare, wanted)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")


@pytest.mark.parametrize("key", ["", "hf_aaaaaaaa_" + "0" * 64, "<script>"])
def test_wrong_key_is_refused_without_its_text(api: Api, key: str) -> None:
    answer = Visitor(api).sign_in(key)
    assert (answer.status_code, "<script>" in answer.text) == (401, False)
    assert "This key is not valid." in answer.text
    assert "set-cookie" not in answer.headers
    check_page(answer)


def test_guesses_are_bounded(home: str, keys: Keys) -> None:
    with Api(home, keys_file=str(keys.path), refused_keys=3) as api:
        visitor = Visitor(api)
        answers = [visitor.sign_in("hf_guess") for _ in range(5)]
    assert [each.status_code for each in answers] == [401, 401, 401, 429, 429]
    assert int(answers[-1].headers["retry-after"]) > 0


def test_sign_in_makes_a_new_session_each_time(api: Api, keys: Keys) -> None:
    visitor = Visitor(api)
    seen = set()
    for _ in range(2):
        visitor.sign_in(keys.spare)
        [cookie] = visitor.client.cookies.jar
        seen.add(cookie.value)
    assert len(seen) == 2


def test_sign_out_ends_the_session(api: Api, visitor: Visitor) -> None:
    [cookie] = visitor.client.cookies.jar
    answer = visitor.send("/sign-out")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/sign-in")
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert visitor.ask("GET", "").status_code == 303
    kept = Visitor(api).ask("GET", "", headers={"cookie": f"{cookie.name}={cookie.value}"})
    assert kept.status_code == 303


def test_sessions_hold_in_every_process_with_the_same_keys(home: str, keys: Keys, visitor: Visitor) -> None:
    with Api(home, keys_file=str(keys.path)) as other:
        second = Visitor(other)
        second.client.cookies = visitor.client.cookies
        second.open_page()


def _revoke(keys: Keys) -> None:
    key_id = id_of(keys.spare)
    change_keys(keys.path, lambda known: {**known, key_id: revoke_key(known[key_id])})


def _rotate(keys: Keys) -> None:
    key_id = id_of(keys.spare)
    change_keys(keys.path, lambda known: {**known, key_id: rotate_key(key_id, known[key_id], timedelta(0))[0]})


@pytest.mark.parametrize("end", [_revoke, _rotate])
@pytest.mark.rows("X07")
def test_end_of_a_key_ends_its_sessions(visitor: Visitor, keys: Keys, end: object) -> None:
    visitor.open_page()
    assert callable(end)
    end(keys)
    assert visitor.ask("GET", "").status_code == 303


@pytest.mark.rows("X07")
@pytest.mark.parametrize("path", ["", "/jobs", "/queues"])
def test_key_that_ends_while_its_session_is_looked_up_opens_nothing(
    visitor: Visitor, keys: Keys, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_session = sessions.Sessions.find_session

    def revoke_when_found(*given: Any, **options: Any) -> sessions.BrowserSession | None:
        found = find_session(*given, **options)
        _revoke(keys)
        return found

    monkeypatch.setattr(sessions.Sessions, "find_session", revoke_when_found)
    assert visitor.ask("GET", path).status_code == 401


@pytest.mark.rows("X07")
def test_session_of_a_rotated_secret_ends_with_the_overlap(visitor: Visitor, keys: Keys) -> None:
    key_id, overlap = id_of(keys.spare), timedelta(seconds=2)
    visitor.open_page()
    change_keys(keys.path, lambda known: {**known, key_id: rotate_key(key_id, known[key_id], overlap)[0]})
    later = Visitor(visitor._api)
    later.sign_in(keys.spare)
    until(lambda: visitor.ask("GET", "").status_code == 303, "the end of the old session")
    until(lambda: later.ask("GET", "").status_code == 303, "the end of the new one")


@pytest.mark.rows("X07")
def test_session_ends_after_a_day_however_much_it_is_used(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    start = int(time.time())
    for hours, status in ((7, 200), (14, 200), (21, 200), (23.9, 200), (24.1, 303)):
        monkeypatch.setattr(sessions, "_now", lambda at=start + int(hours * HOUR): at)
        assert visitor.ask("GET", "").status_code == status


def test_signed_out_session_stays_ended(api: Api, visitor: Visitor) -> None:
    cookie = visitor.client.cookies.jar
    copied = "; ".join(f"{each.name}={each.value}" for each in cookie)
    visitor.act("/sign-out")
    assert Visitor(api).ask("GET", "", headers={"cookie": copied}).status_code == 303


@pytest.mark.rows("X07")
def test_session_ends_after_eight_idle_hours(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    start = int(time.time())
    for hours, status in ((7, 200), (14, 200), (14 + 7.9, 200), (14 + 7.9 + 8.1, 303)):
        monkeypatch.setattr(sessions, "_now", lambda at=start + int(hours * HOUR): at)
        assert visitor.ask("GET", "").status_code == status


def test_refreshing_page_does_not_prolong_a_session(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    start = int(time.time())
    for hours, status in ((7, 200), (8.1, 303)):
        monkeypatch.setattr(sessions, "_now", lambda at=start + int(hours * HOUR): at)
        assert visitor.ask("GET", "", headers={"hx-trigger": "live"}).status_code == status


def test_changed_cookie_is_no_session(api: Api, keys: Keys, visitor: Visitor) -> None:
    [cookie] = visitor.client.cookies.jar
    key_id, session_id, began_at, ends_at, signature = str(cookie.value).split(".")
    other = id_of(keys.make("admin"))
    for value in (
        f"{other}.{session_id}.{began_at}.{ends_at}.{signature}",
        f"{key_id}.{session_id}.{began_at}.{int(ends_at) + 1}.{signature}",
        f"{key_id}.{session_id}.{int(began_at) + 1}.{ends_at}.{signature}",
        f"{key_id}.{'0' * 32}.{began_at}.{ends_at}.{signature}",
        f"{key_id}.{session_id}.{began_at}.{ends_at}.{'0' * 64}",
        f"local.{session_id}.{began_at}.{ends_at}.{signature}",
        "",
        "x" * 5000,
    ):
        answer = Visitor(api).ask("GET", "", headers={"cookie": f"{cookie.name}={value}"})
        assert answer.status_code == 303


def test_secret_of_sessions_is_private_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first = sessions.shared_secret(path)
    assert sessions.shared_secret(path) == first
    assert (tmp_path / "keys.toml.sessions").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "mode", "remedy"),
    [
        ("0" * 64, 0o644, "chmod 600"),
        ("0" * 64, 0o660, "chmod 600"),
        ("", 0o600, "openssl rand -hex 32"),
        ("short", 0o600, "openssl rand -hex 32"),
        ("\xff" * 64, 0o600, "openssl rand -hex 32"),
    ],
)
def test_api_with_an_unusable_secret_of_sessions_does_not_start(
    home: str, keys: Keys, content: str, mode: int, remedy: str
) -> None:
    path = keys.path.with_name(keys.path.name + ".sessions")
    path.write_bytes(content.encode("latin-1"))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=remedy):
        create_app(Holdfast(home, keys_file=str(keys.path)))


def test_secret_of_sessions_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys.toml.sessions").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        sessions.shared_secret(tmp_path / "keys.toml")


def test_sign_in_of_another_site_is_refused(api: Api, keys: Keys) -> None:
    visitor = Visitor(api)
    for headers in ({"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "none"}, {"sec_fetch_site": "same-site"}):
        answer = visitor.send("/sign-in", {"key": keys.spare}, token=None, **headers)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


def test_api_itself_does_not_accept_the_cookie(api: Api, visitor: Visitor) -> None:
    answer = api.run(visitor.client.get("/v1/queues", headers=OWN))
    assert answer.status_code == 401


def test_application_without_the_package_says_so(home: str, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "holdfast.web.console.site", None)
    app = Holdfast(home, keys_file=str(keys.path))
    with Api(home) as api:
        answer = api.run(Visitor(api, site=create_app(app)).client.get("/console"))
    assert (answer.status_code, answer.json()["code"]) == (404, "no_console")


def test_sign_in_reads_a_short_form_and_repeats_no_foreign_address(api: Api) -> None:
    assert Visitor(api).send("/sign-in", {"key": "x", "next": "/" * 20_000}, token=None).status_code == 413
    answer = Visitor(api).send("/sign-in", {"key": "x", "next": "//evil.example/\x01"}, token=None)
    assert answer.status_code == 401
    assert "evil.example" not in answer.text


def test_console_behind_tls_asks_the_browser_to_stay_there(home: str, keys: Keys) -> None:
    with Api(home, keys_file=str(keys.path), trusted_proxies=["127.0.0.1"]) as api:
        answer = Visitor(api).ask("GET", "/sign-in", headers={"x-forwarded-proto": "https"})
        assert answer.headers["strict-transport-security"] == "max-age=31536000"
        assert "strict-transport-security" not in Visitor(api).ask("GET", "/sign-in").headers


def test_overview_of_a_key_for_some_queues_says_what_is_wrong_there(open_api: Api, keys: Keys) -> None:
    for queue in ("crm", "secret"):
        open_api.submit(queue=queue)
        open_api.post(f"/v1/queues/{queue}/pause", {})
        open_api.post("/v1/limits", {"name": f"calls-{queue}", "queue": queue, "concurrency": 1}, 201)
        open_api.post(f"/v1/limits/calls-{queue}/pause", {"for": "10m"})
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", "operate", queues=("crm",)))
    page = visitor.open_page()
    assert "queue crm is paused and holds 1 job" in page
    assert "limit calls-crm is paused until" in page
    assert "secret" not in page
    visitor.act("/queues/crm/resume")
    visitor.act("/limits/calls-crm/resume")
    assert "no worker serves queue crm" in visitor.open_page()


def test_key_for_several_queues_without_a_job_sees_empty_lists(open_api: Api, keys: Keys) -> None:
    open_api.submit(queue="secret")
    for queues in (("crm", "mail"), ("crm.*",)):
        visitor = Visitor(open_api)
        visitor.sign_in(keys.make("read", queues=queues))
        assert "There are no jobs yet" in visitor.open_page("/jobs")
        assert 'class="empty"' in visitor.open_page("/batches")


def test_list_for_a_key_of_several_queues_names_its_queue(open_api: Api, keys: Keys) -> None:
    for queue in ("a", "b", "b", "secret"):
        open_api.dead(queue=queue, tags=["red"])
        open_api.post("/v1/batches", {"jobs": [{"task": "work", "payload": {}, "queue": queue}], "queue": queue}, 201)
    group = open_api.get("/v1/errors")["groups"][0]["id"]
    visitor = Visitor(open_api)
    visitor.sign_in(keys.make("read", queues=("a", "b")))
    overview = visitor.open_page()
    assert '<a href="/console/queues">3</a>' in overview  # the sum of both: the page of queues has the parts
    assert '<a href="/console/jobs?queue=b&amp;state=dead">2</a>' in visitor.open_page("/queues")
    page = visitor.open_page("/jobs?state=dead&tag=red")
    assert ("this list is of queue a." in page, page.count('id="job-')) == (True, 1)
    [other] = re.findall(r'href="/console(/jobs\?[^"]*)">b</a>', page)
    page = visitor.open_page(unescape(other))
    assert ("this list is of" in page, page.count('id="job-')) == (False, 2)
    page = visitor.open_page("/batches")
    assert ("this list is of queue a." in page, "/console/batches?queue=b" in page) == (True, True)
    page = visitor.open_page(f"/errors/{group}")
    links = re.findall(r'href="/console(/jobs\?[^"]*)">([^<]*)</a>', page)
    shown = {text: visitor.open_page(unescape(path)).count('id="job-') for path, text in links if "state=dead" in path}
    assert shown == {"in a": 1, "in b": 2}
    visitor.sign_in(keys.make("read", queues=("b",)))
    assert '<a href="/console/jobs?state=dead">2</a>' in visitor.open_page()
    assert "this list is of" not in visitor.open_page("/jobs")
