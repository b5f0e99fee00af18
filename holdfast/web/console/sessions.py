"""Sessions of the console: signed cookies, bound to a key and its current secret.

No session is stored. A cookie holds the id of the key, a random id, the beginning and the end of the session, signed
with a secret that all processes with one file of keys share. The signature covers the hash of the key's secret with
which the session began: when that secret is revoked, expires or ends after a rotation, its sessions end everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
import time
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast.core.errors import ConfigError
from holdfast.web.authentication import Authenticator
from holdfast.web.keys import ConsoleUser, Principal, unauthorized_refusal
from holdfast.web.messages import ApiRequest, Header

IDLE_SECONDS = 8 * 3600
MAX_SECONDS = 24 * 3600
"""Seconds after which a session ends, however much it is used."""
_RENEWED_AFTER = 300  # seconds after which a request of a person gets a new cookie
_PORT = re.compile(rb":(\d{1,5})$")
_SECRET = re.compile("[0-9a-f]{64}")
_TOKEN = re.compile(r"([a-z2-7]{8}|local|user)\.([0-9a-f]{32})\.(\d{1,12})\.(\d{1,12})\.([0-9a-f]{64})")
_LOCAL, _USER = "local", "user"
_NOTICE_DIGITS = 16
_PLACE_DIGITS = 8
_TOO_OPEN = stat.S_IWGRP | stat.S_IRWXO


class BrowserSession(msgspec.Struct, frozen=True):
    """A signed-in browser. ``key_id``: None for a user, and for the console of this host without keys.

    ``key_hash``: of the secret with which it has signed in, or of the name of its user.
    """

    key_id: str | None
    key_hash: str
    id: str
    began_at: int
    ends_at: int
    user: ConsoleUser | None = None


class Sessions:
    """Issues and checks the sessions of one console."""

    def __init__(self, authenticator: Authenticator, keys_file: Path | None) -> None:
        self._authenticator = authenticator
        self._secret = secrets.token_bytes(32) if keys_file is None else shared_secret(keys_file)
        self._ended: OrderedDict[str, int] = OrderedDict()  # when each could have gone on to

    def new_session(
        self, key_id: str | None = None, key_hash: str = "", user: ConsoleUser | None = None
    ) -> BrowserSession:
        """Returns a new session with a random id."""
        if user is not None:
            key_hash = _user_hash(user)
        return BrowserSession(key_id, key_hash, secrets.token_hex(16), _now(), _now() + IDLE_SECONDS, user)

    def renew_session(self, session: BrowserSession) -> BrowserSession:
        """Returns the session with a new end."""
        ends_at = min(_now() + IDLE_SECONDS, session.began_at + MAX_SECONDS)
        return msgspec.structs.replace(session, ends_at=ends_at)

    def find_session(self, request: ApiRequest, user: ConsoleUser | None, *, is_secure: bool) -> BrowserSession | None:
        """Returns the session of the request's cookie, if it is valid, and that of the user if there is one."""
        for token in _cookies(request, _cookie_name(request, is_secure=is_secure)):
            session = self._verify(token, user)
            if session is not None:
                return session
        return None

    def is_valid(self, session: BrowserSession) -> bool:
        """Returns True until the session ends, is signed out, or its key ceases to be valid."""
        is_over = session.ends_at <= _now() or session.id in self._ended
        return not is_over and session.key_hash in self._key_hashes(session.key_id, session.user)

    def authorize_session(self, request: ApiRequest, session: BrowserSession) -> Principal:
        """Returns the principal of a session that was valid just now; refuses one whose key has ended since."""
        if session.user is not None:
            return session.user.to_principal(request.client)
        if session.key_id is None:
            return Principal(address=request.client)
        key = self._authenticator.active_key(session.key_id)
        if key is None:
            raise unauthorized_refusal()
        return self._authenticator.admit_key(request, session.key_id, key)

    def end_session(self, session: BrowserSession) -> None:
        """Signs the session out, in this process; its browser forgets the cookie."""
        self._ended[session.id] = session.began_at + MAX_SECONDS
        while next(iter(self._ended.values())) < _now():
            self._ended.popitem(last=False)

    def is_renewable(self, session: BrowserSession) -> bool:
        """Returns True if the session has been in use for long enough to get a new end."""
        return session.ends_at - _now() < IDLE_SECONDS - _RENEWED_AFTER

    def form_token(self, session: BrowserSession) -> str:
        """Returns the token that every form of this session carries."""
        return self._sign(f"form.{session.id}", session.key_hash)

    def is_form_token(self, session: BrowserSession, given: str) -> bool:
        """Returns True if a form belongs to this session."""
        return hmac.compare_digest(self.form_token(session).encode(), given.encode())

    def sign_notice(self, session: BrowserSession, name: str) -> str:
        """Returns the name of a notice for an address: no link of others can make a page of this session say it."""
        return f"{name}.{self._sign(f'notice.{name}.{session.id}', session.key_hash)[:_NOTICE_DIGITS]}"

    def read_notice(self, session: BrowserSession, text: str) -> str:
        """Returns the name of a notice that this session has signed; "" for anything else."""
        name = text.partition(".")[0]
        return name if hmac.compare_digest(self.sign_notice(session, name).encode(), text.encode()) else ""

    def session_cookie(self, session: BrowserSession, request: ApiRequest, path: str, *, is_secure: bool) -> Header:
        """Returns the header that stores the session in the browser. ``path``: where the console is."""
        name = session.key_id or (_LOCAL if session.user is None else _USER)
        content = f"{name}.{session.id}.{session.began_at}.{session.ends_at}"
        token = f"{content}.{self._sign(content, session.key_hash)}"
        return _set_cookie(request, token, path, session.ends_at - _now(), is_secure=is_secure)

    # ── signatures ────────────────────────────────────────────────────────────────────────────────────────────
    def _verify(self, token: str, user: ConsoleUser | None) -> BrowserSession | None:
        found = _TOKEN.fullmatch(token)
        if found is None:
            return None
        name, session_id, began_at, ends_at, signature = found.groups()
        if (name == _USER) != (user is not None):
            return None
        key_id = None if name in (_LOCAL, _USER) else name
        for key_hash in self._key_hashes(key_id, user):
            expected = self._sign(f"{name}.{session_id}.{began_at}.{ends_at}", key_hash)
            session = BrowserSession(key_id, key_hash, session_id, int(began_at), int(ends_at), user)
            if hmac.compare_digest(signature, expected) and self.is_valid(session):
                return session
        return None

    def _key_hashes(self, key_id: str | None, user: ConsoleUser | None) -> list[str]:
        """Returns the hashes of the secrets with which a key is valid now, or that of a user's name."""
        if user is not None:
            return [_user_hash(user)]
        if key_id is None:
            return [] if self._authenticator.has_keys else [""]
        key = self._authenticator.active_key(key_id)
        return [] if key is None else key.valid_hashes(datetime.now(UTC))

    def _sign(self, content: str, key_hash: str) -> str:
        return hmac.new(self._secret, f"{content}|{key_hash}".encode(), hashlib.sha256).hexdigest()


def _user_hash(user: ConsoleUser) -> str:
    return hashlib.sha256(f"user:{user.name}".encode()).hexdigest()


def expired_cookie(request: ApiRequest, path: str, *, is_secure: bool) -> Header:
    """Returns the header that removes the session from the browser."""
    return _set_cookie(request, "", path, 0, is_secure=is_secure)


_NAME = "holdfast_console"


def _cookie_name(request: ApiRequest, *, is_secure: bool) -> str:
    """Returns the name of the cookie, which has the port and the place where the API is mounted.

    Browsers share cookies between the ports of a host; one with ``__Host-`` has no path of its own, either.
    """
    port = _PORT.search(request.headers.get(b"host", b""))
    place = request.root_path.strip("/")
    parts = [port[1].decode()] if port else []
    parts += [hashlib.sha256(place.encode()).hexdigest()[:_PLACE_DIGITS]] if place else []
    return "_".join(["__Host-" * is_secure + _NAME, *parts])


def _set_cookie(request: ApiRequest, token: str, path: str, seconds: int, *, is_secure: bool) -> Header:
    name, where = _cookie_name(request, is_secure=is_secure), "/; Secure" if is_secure else path
    return (b"set-cookie", f"{name}={token}; Path={where}; Max-Age={seconds}; HttpOnly; SameSite=Lax".encode())


def _cookies(request: ApiRequest, wanted: str) -> list[str]:
    header = request.headers.get(b"cookie", b"").decode("latin-1")
    pairs = [each.strip().partition("=") for each in header.split(";")]
    return [value for name, _, value in pairs if name == wanted]


def shared_secret(keys_file: Path) -> bytes:
    """Returns the secret beside the file of keys, and makes it if it is missing.

    A folder that cannot be written to, as of a mounted secret, gives a secret of this process alone.
    """
    path = _secret_path(keys_file)
    if not path.exists():
        _write_secret(path)
    return _read_secret(path) or secrets.token_bytes(32)


def check_secret(keys_file: Path) -> None:
    """Raises ConfigError for a secret that cannot be used: the sessions of other processes would not hold here."""
    _read_secret(_secret_path(keys_file))


def _secret_path(keys_file: Path) -> Path:
    return keys_file.with_name(keys_file.name + ".sessions")


def _read_secret(path: Path) -> bytes | None:
    """Returns the secret; None if there is none."""
    try:
        with path.open("rb") as file:
            content, mode = file.read(100).decode("ascii", "replace").strip(), os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: the secret of console sessions cannot be read: {error.strerror}") from None
    if mode & _TOO_OPEN:
        problem = f"other users may read or change it; run chmod 600 {path}, or remove it: the console makes one"
        raise ConfigError(f"{path}: the secret of console sessions cannot be used: {problem}")
    if not _SECRET.fullmatch(content):
        problem = "it is not 64 hexadecimal digits; write some (openssl rand -hex 32), or remove it"
        raise ConfigError(f"{path}: the secret of console sessions cannot be used: {problem}")
    return bytes.fromhex(content)


def _write_secret(path: Path) -> None:
    """Makes the file whole or not at all; another process may make it at the same time, and then that one stands."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".sessions-", dir=path.parent) as folder:
        fresh = Path(folder) / "secret"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        path.hardlink_to(fresh)


def _now() -> int:
    return int(time.time())
