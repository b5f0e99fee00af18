"""API keys: which are good, what each may do, and how their file is followed."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hmac import compare_digest
from pathlib import Path

import httpx
import pytest

from holdfast.core.clock import ManualClock, SystemClock
from holdfast.core.errors import ConfigError, Conflict, Invalid
from holdfast.core.events import Events, KeyRefused, KeysRead, KeysUnreadable
from holdfast.web.asgi import OPERATIONS
from holdfast.web.keys import SCOPES, Principal, _hash, check_token, new_key, revoke_key, rotate_key, valid_key_id
from holdfast.web.keys_file import Keyring, KeyUsage, change_keys, read_keys, read_usage, write_usage
from holdfast.web.routing import Operation
from tests.web.client import UNKNOWN_ID, Api
from tests.web.keyed import Keys, ask, id_of, refused
from tests.web.serving import Served, answer_on

NOW = datetime(2031, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def api(keys: Keys) -> Iterator[Api]:
    with Api(f"sqlite:///{keys.path.parent}/jobs.db", keys_file=str(keys.path), refused_keys=1_000_000) as api:
        yield api


@pytest.fixture(scope="module")
def tokens(keys: Keys) -> dict[str, str]:
    """A key for each scope."""
    return {scope: keys.make(scope) for scope in SCOPES}


def _path(operation: Operation) -> str:
    """A path of it that asks for something it has no word for, so that what is admitted is refused all the same."""
    places = {"job_id": UNKNOWN_ID, "queue": "default", "schedule": "nightly", "limit": "crm", "asset": "docs.js"}
    places["group"] = "batch"
    return re.sub(r"{(\w+)}", lambda found: places[found[1]], operation.path) + "?nonsense=1"


# ── scopes ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_operation_says_its_scope() -> None:
    free = {operation.path for operation in OPERATIONS if operation.scope is None}
    assert free <= {"/health", "/health/live", "/health/ready", "/docs", "/docs/{asset}"}
    assert {operation.scope for operation in OPERATIONS} <= {*SCOPES, None}
    reading = {operation.name for operation in OPERATIONS if operation.method != "GET" and operation.scope == "read"}
    assert reading == set()  # who may only read changes nothing


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_key_may_do_what_its_scopes_say(operation: Operation, api: Api, tokens: dict[str, str]) -> None:
    answer = ask(api, None, operation.method, _path(operation))
    if operation.scope is None:
        assert answer.status_code == 422
        return
    refused(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    for scope, token in tokens.items():
        answer = ask(api, token, operation.method, _path(operation))
        if scope in (operation.scope, "admin"):
            assert answer.status_code in (415, 422), answer.text
        else:
            problem = refused(answer, 403, "forbidden")
            assert operation.scope in problem["detail"]


def test_the_description_says_which_scope_each_operation_needs(api: Api, tokens: dict[str, str]) -> None:
    document = ask(api, tokens["read"], "GET", "/openapi.json").json()
    assert document["components"]["securitySchemes"].keys() == {"bearer", "header"}
    for operation in OPERATIONS:
        given = document["paths"][operation.path][operation.method.lower()]
        scope = operation.scope
        assert given.get("security") == (None if scope is None else [{"bearer": [scope]}, {"header": [scope]}])


# ── good keys and others ──────────────────────────────────────────────────────────────────────────────────────────
def _shown(api: Api, **headers: str) -> httpx.Response:
    return api.ask("GET", "/v1/queues", headers={name.replace("_", "-"): text for name, text in headers.items()})


def test_key_is_accepted_as_bearer_or_in_its_own_header(api: Api, tokens: dict[str, str]) -> None:
    key = tokens["read"]
    assert _shown(api, authorization=f"Bearer {key}").status_code == 200
    assert _shown(api, authorization=f"bearer  {key} ").status_code == 200
    assert _shown(api, x_api_key=key).status_code == 200


class Wrong:
    """Keys that are good for nothing, by what is wrong with them, and one that is good."""

    def __init__(self, keys: Keys) -> None:
        self.good = keys.make("read")
        gone, old = keys.make("read"), keys.make("read")
        self.bad = {
            "empty": "",
            "long": "x" * 8000,
            "of another form": self.good[3:],
            "another secret": self.good[:-1] + ("1" if self.good[-1] == "0" else "0"),
            "no such id": "hf_aaaaaaaa_" + "0" * 64,
            "the hash": self.good.replace(self.good.split("_")[2], read_keys(keys.path)[id_of(self.good)].hash),
            "revoked": gone,
            "expired": keys.make("read", expires_at=datetime.now(UTC) - HOUR),
            "rotated out": old,
        }
        change_keys(
            keys.path,
            lambda present: {
                **present,
                id_of(gone): revoke_key(present[id_of(gone)]),
                id_of(old): rotate_key(id_of(old), present[id_of(old)], timedelta(0))[0],
            },
        )


def test_change_stands_though_its_folder_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    keys = Keys(tmp_path)
    assert id_of(keys.spare) in read_keys(keys.path)


@pytest.fixture(scope="module")
def wrong(keys: Keys) -> Wrong:
    return Wrong(keys)


def test_every_invalid_key_gets_the_same_answer(api: Api, wrong: Wrong) -> None:
    key = wrong.good
    shown = [{"authorization": f"Bearer {text}"} for text in wrong.bad.values()]
    shown += [{"x-api-key": text} for text in wrong.bad.values()]
    shown += [{"authorization": "Basic " + key}, {"authorization": f"Bearer {key}", "x-api-key": key}]
    shown += [{"x-api-key": b"\xff\xfe\xe9".decode("latin-1")}, {}]
    for text in (key + "\n", "\n" + key, key[:20] + "\r\n" + key[20:], key + "\0"):  # no server of ours lets them pass
        shown += [{"authorization": f"Bearer {text}"}, {"x-api-key": text}]
    answers = [
        api.ask("GET", "/v1/queues", headers={n: v.encode("latin-1") for n, v in each.items()}) for each in shown
    ]
    documents = [{**answer.json(), "request_id": ""} for answer in answers]
    headers = [{**answer.headers, "x-request-id": ""} for answer in answers]
    assert [answer.status_code for answer in answers] == [401] * len(shown)
    assert documents == [documents[0]] * len(shown)
    assert headers == [headers[0]] * len(shown)
    refused(api.ask("GET", "/v1/queues", params={"key": key}), 401, "unauthorized")


def test_too_long_key_is_refused_before_it_is_checked(api: Api, wrong: Wrong) -> None:
    texts = [text + "x" * 1024 * 1024 for text in (wrong.good, wrong.bad["revoked"], "")]
    problems = [api.refused("GET", "/v1/queues", 431, headers={"x-api-key": text}) for text in texts]
    assert {(each["code"], each["detail"]) for each in problems} == {("headers_too_large", "the headers are too large")}


def test_key_no_header_can_hold_is_refused_alike(keys: Keys, wrong: Wrong) -> None:
    texts = [wrong.good, *(wrong.bad[name] for name in ("another secret", "no such id", "revoked", "expired"))]
    forms = ("{0}\n{1}", "{0}{1}\n", "{0}\r{1}", "{0}\0{1}", "{0}\r\n {1}", "{0}{1}" + "x" * 40_000)
    head = "GET /v1/queues HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {0}\r\n\r\n"
    folder, reported = keys.path.parent, []
    with Served(folder, f"sqlite:///{folder}/jobs.db", keys_file=str(keys.path)) as served:
        for form in forms:
            answers = set()
            for text in texts:
                with served.connect() as connection:
                    connection.sendall(head.format(form.format(text[:20], text[20:])).encode())
                    answers.add(re.sub(rb"(?i)(request[-_]id|date)\W+[^\r\"]+", b"", answer_on(connection)))
            (answer,) = answers
            reported.append(answer.split()[1])
    assert reported == [b"400"] * 5 + [b"431"]


def test_a_key_is_compared_whether_there_is_one_or_not(
    wrong: Wrong, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time is the same for all: how long an answer takes tells of no key."""
    done: list[object] = []

    def hashed(secret: str) -> str:
        done.append(len(secret))
        return _hash(secret)

    def compared(one: str, other: str) -> bool:
        done.append((len(one), len(other)))
        return compare_digest(one, other)

    monkeypatch.setattr("holdfast.web.keys._hash", hashed)
    monkeypatch.setattr("hmac.compare_digest", compared)
    present, now = read_keys(keys.path), datetime.now(UTC)
    for name, text in wrong.bad.items():
        done.clear()
        assert valid_key_id(present, text, now) is None
        is_one = re.fullmatch(r"hf_[a-z2-7]{8}_[0-9a-f]{64}", text)
        assert done == [64 if is_one else 0, (71, 71), (71, 71)], name


def test_the_file_holds_no_key(keys: Keys) -> None:
    secret = keys.make("submit").split("_")[2]
    assert secret not in keys.path.read_text()


def test_the_log_says_which_key_was_refused_and_why() -> None:
    now = datetime.now(UTC)
    key_id, key, token = new_key("a test's", ("read",), (), now + 9 * HOUR)
    newer, other = rotate_key(key_id, key, HOUR)
    newest, _ = rotate_key(key_id, newer, timedelta(0))
    found = [
        check_token({key_id: newer}, other, now),
        check_token({key_id: newer}, token, now),
        check_token({key_id: newer}, token, now + 2 * HOUR),
        check_token({key_id: newer}, other, now + 9 * HOUR),
        check_token({key_id: revoke_key(newer)}, other, now + HOUR),
        check_token({key_id: newest}, token, now),
        check_token({}, token, now),
        check_token({key_id: key}, token[3:], now),
        check_token({key_id: key}, "", now),
    ]
    assert [tuple(each) for each in found] == [
        (key_id, None),
        (key_id, None),
        (key_id, "the secret was rotated out"),
        (key_id, "the key is expired"),
        (key_id, "the key is revoked"),
        (None, f"key {key_id} has another secret"),
        (None, f"there is no key {key_id}"),
        (None, "what was shown is no key"),
        (None, "no key was shown"),
    ]


def test_a_revoked_key_that_is_shown_stands_in_the_log(api: Api, keys: Keys) -> None:
    reported: list[KeyRefused] = []
    api.app.events.subscribe(reported.append, KeyRefused)
    token = keys.make("read")
    change_keys(keys.path, lambda present: {**present, id_of(token): revoke_key(present[id_of(token)])})
    refused(ask(api, token, "GET", "/v1/queues"), 401, "unauthorized")
    assert [(event.who, event.problem) for event in reported] == [(id_of(token), "the key is revoked")]


def test_an_expired_a_revoked_and_a_rotated_key() -> None:
    key_id, key, token = new_key("x", ("read",), (), NOW + HOUR)
    assert valid_key_id({key_id: key}, token, NOW) == key_id
    assert valid_key_id({key_id: key}, token, NOW + HOUR) is None
    _, key, token = new_key("x", ("read",))
    newer, other = rotate_key(key_id, key, HOUR)
    token, now = f"hf_{key_id}_{token.split('_')[2]}", datetime.now(UTC)
    assert [valid_key_id({key_id: newer}, each, now) for each in (token, other)] == [key_id, key_id]
    assert [valid_key_id({key_id: newer}, each, now + 2 * HOUR) for each in (token, other)] == [None, key_id]
    at_once, latest = rotate_key(key_id, newer, timedelta(0))
    assert [valid_key_id({key_id: at_once}, each, now) for each in (token, other, latest)] == [None, None, key_id]
    assert valid_key_id({key_id: revoke_key(newer)}, other, datetime.now(UTC)) is None
    with pytest.raises(Conflict):
        rotate_key(key_id, revoke_key(newer), HOUR)


@pytest.mark.parametrize(
    ("name", "scopes", "queues"),
    [("", ("read",), ()), ("\x1b", ("read",), ()), ("x", (), ()), ("x", ("write",), ()), ("x", ("read",), ("A/",))],
)
def test_a_key_that_makes_no_sense_is_not_made(name: str, scopes: tuple[str, ...], queues: tuple[str, ...]) -> None:
    with pytest.raises(Invalid):
        new_key(name, scopes, queues)


@pytest.mark.parametrize(
    ("patterns", "theirs", "others"),
    [
        (("*",), ("mail", "a.b"), ()),
        (("mail",), ("mail",), ("mails", "email", "mai")),
        (("mail.*", "sms"), ("mail.", "mail.a.b", "sms"), ("mail", "xmail.a", "smsx")),
        (("shard-?",), ("shard-1",), ("shard-", "shard-10")),
    ],
    ids=str,
)
def test_patterns_match_whole_names(
    patterns: tuple[str, ...], theirs: tuple[str, ...], others: tuple[str, ...]
) -> None:
    caller = Principal(key="k", queues=patterns)
    assert [caller.allows_queue(queue) for queue in (*theirs, *others)] == [True] * len(theirs) + [False] * len(others)


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_broken_keys_file_keeps_the_last_valid_keys(tmp_path: Path) -> None:
    keys, clock, events, reported = Keys(tmp_path), ManualClock(), Events(), []
    events.subscribe(reported.append, KeysRead, KeysUnreadable)
    ring = Keyring(keys.path, clock, events)
    newer = keys.make("read")
    assert ring.find(newer) is not None
    whole = keys.path.read_text()
    for broken in ("[keys", '[keys.aaaaaaaa]\nname = "x"\n', ""):
        keys.path.unlink() if not broken else keys.path.write_text(broken)
        assert ring.find(newer) is not None
        assert ring.problem is not None
        clock.advance(2)  # it is read again, and reported no more
        assert ring.find(newer) is not None
    keys.path.write_text(whole)
    keys.path.chmod(0o644)
    assert ring.find(newer) is not None
    assert "chmod 600" in (ring.problem or "")
    keys.path.chmod(0o600)
    assert ring.find(newer) is not None
    assert ring.problem is None
    change_keys(keys.path, lambda present: {**present, id_of(newer): revoke_key(present[id_of(newer)])})
    assert ring.find(newer) is None
    kinds = [type(event).__name__ for event in reported]
    assert kinds == ["KeysRead", *["KeysUnreadable"] * 4, "KeysRead", "KeysRead"]


def test_health_says_that_the_file_is_broken(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    with Api(f"sqlite:///{tmp_path}/jobs.db", keys_file=str(keys.path)) as api:
        assert api.get("/health") == {"status": "ok", "service": "holdfast-api"}
        whole = keys.path.read_text()
        keys.path.write_text("[")
        [warning] = api.get("/health")["warnings"]
        assert "keys" in warning
        assert str(tmp_path) not in warning  # anybody may read it
        assert ask(api, keys.spare, "GET", "/v1/queues").status_code == 200
        keys.path.write_text(whole)
        assert "warnings" not in api.get("/health")


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602, 0o666])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    keys = Keys(tmp_path)
    keys.path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600 it, or mount it 0440"):
        read_keys(keys.path)


def test_invalid_keys_file_is_refused_at_start(tmp_path: Path) -> None:
    for name in ("absent.toml", "."):
        with pytest.raises(ConfigError, match="keys_file"):
            Api(f"sqlite:///{tmp_path}/jobs.db", keys_file=str(tmp_path / name))


def test_changes_leave_the_rest_of_the_file_alone(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    given = keys.path.read_text().replace("scopes =", "# who may do everything\nscopes =")
    keys.path.write_text(given)
    keys.make("read")
    assert keys.path.read_text().startswith(given)
    assert keys.path.stat().st_mode & 0o777 == 0o600


def test_when_a_key_was_used_is_known(tmp_path: Path, keys: Keys, api: Api) -> None:
    path = tmp_path / "keys.toml"
    assert read_usage(path) == {}
    write_usage(path, {"a": NOW, "b": NOW})
    write_usage(path, {"b": NOW - HOUR, "c": NOW + HOUR})
    assert read_usage(path) == {"a": NOW, "b": NOW, "c": NOW + HOUR}
    path.with_name("keys.toml.used").write_text("{")
    assert read_usage(path) == {}
    write_usage(tmp_path / "absent" / "keys.toml", {"a": NOW})  # no error
    ask(api, keys.spare, "GET", "/v1/queues")

    while not read_usage(keys.path):
        api.run(asyncio.sleep(0.01))
    assert set(read_usage(keys.path)) <= set(read_keys(keys.path))


def test_uses_of_a_key_since_the_last_write_are_kept_when_the_server_stops(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    async def serve() -> None:
        usage = KeyUsage(path, SystemClock())
        usage.record_use("first")
        while not read_usage(path):  # noqa: ASYNC110 - the file is made by a thread
            await asyncio.sleep(0.01)
        usage.record_use("second")
        await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert set(read_usage(path)) == {"first", "second"}


def test_metrics_need_a_key_unless_the_settings_open_them(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    for is_open, status in ((False, 401), (True, 200)):
        url = f"sqlite:///{tmp_path}/jobs.db"
        with Api(url, keys_file=str(keys.path), metrics_open=is_open) as api:
            assert api.run(api.raw("GET", "/metrics")).status_code == status
            assert api.run(api.raw("GET", "/v1/jobs")).status_code == 401
