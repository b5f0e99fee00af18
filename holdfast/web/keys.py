"""API keys: their parts, their creation, and the check of a presented key.

A key is ``hf_<id>_<secret>``. The secret has 256 random bits, so SHA-256 is as safe as a slow hash: the secret cannot
be guessed from it. The id identifies the key; it is not secret and appears in logs.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from holdfast.core.errors import Conflict, Invalid
from holdfast.core.validation import did_you_mean, is_printable_line
from holdfast.web.messages import Refusal, join_words

Scope = Literal["submit", "read", "operate", "work", "admin"]
"""Permission of a key. Each operation needs one; ``admin`` includes all."""

SCOPES: tuple[Scope, ...] = ("submit", "read", "operate", "work", "admin")
EVERY_QUEUE = "*"

_WHOLE = re.compile(r"hf_([a-z2-7]{8})_")
_TOKEN = re.compile(r"hf_([a-z2-7]{8})_([0-9a-f]{64})")
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
_PATTERN = re.compile(r"[a-z0-9._*?-]{1,64}")
_MAX_NAME = 100
_NO_HASH = "sha256:" + "0" * 64  # compared for an unknown key, so the check takes as long

Hash = Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]
Instant = Annotated[datetime, Meta(tz=True)]


class Key(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A key of the file. ``former_hash``: of the secret before the last rotation, valid until ``former_until``."""

    name: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    hash: Hash
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)]
    queues: Annotated[tuple[str, ...], Meta(min_length=1)] = (EVERY_QUEUE,)
    created_at: Instant
    expires_at: Instant | None = None
    revoked_at: Instant | None = None
    former_hash: Hash | None = None
    former_until: Instant | None = None

    def state(self, now: datetime) -> str:
        """Returns ``active``, ``revoked`` or ``expired``."""
        if self.revoked_at is not None and self.revoked_at <= now:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"

    def valid_hashes(self, now: datetime) -> list[str]:
        """Returns the hashes of the secrets with which the key is valid now: two after a rotation with an overlap."""
        is_former_valid = self.former_hash and self.former_until is not None and now < self.former_until
        return [self.hash, self.former_hash] if self.former_hash and is_former_valid else [self.hash]


def new_key(
    name: str, scopes: tuple[str, ...], queues: tuple[str, ...] = (), expires_at: datetime | None = None
) -> tuple[str, Key, str]:
    """Creates a key. Returns its id, its stored part, and the whole key, to be shown once."""
    key_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(8))
    secret = secrets.token_hex(32)
    key = Key(
        name=_check_name(name),
        hash=_hash(secret),
        scopes=check_scopes(scopes),
        queues=check_patterns(queues) or (EVERY_QUEUE,),
        created_at=datetime.now(UTC),
        expires_at=expires_at,
    )
    return key_id, key, f"hf_{key_id}_{secret}"


def rotate_key(key_id: str, key: Key, overlap: timedelta) -> tuple[Key, str]:
    """Returns the key with a new secret, and the whole key. The old secret stays valid for ``overlap``."""
    now = datetime.now(UTC)
    if key.state(now) != "active":
        raise Conflict(f"key {key_id} is {key.state(now)}; create another")
    secret = secrets.token_hex(32)
    kept = {"former_hash": key.hash, "former_until": now + overlap} if overlap else {}
    bare = msgspec.structs.replace(key, former_hash=None, former_until=None)
    return msgspec.structs.replace(bare, hash=_hash(secret), **kept), f"hf_{key_id}_{secret}"


def revoke_key(key: Key) -> Key:
    """Returns the key as revoked."""
    return msgspec.structs.replace(key, revoked_at=key.revoked_at or datetime.now(UTC))


def hash_token(token: str) -> str:
    """Returns the hash of the secret in a key, as the file has it."""
    found = _TOKEN.fullmatch(token)
    return _hash(found[2]) if found else _NO_HASH


class KeyCheck(NamedTuple):
    """Result of a check of a token: the id of its key, and the problem, if any."""

    key_id: str | None
    problem: str | None


def check_token(keys: Mapping[str, Key], token: str, now: datetime) -> KeyCheck:
    """Checks that a token is a valid key now. The problem is for the log, never for the caller."""
    found = _TOKEN.fullmatch(token)
    key_id, secret = found.groups() if found else ("", "")
    key = keys.get(key_id)
    presented = _hash(secret)
    hashes = (_NO_HASH, None) if key is None else (key.hash, key.former_hash)
    is_current = hmac.compare_digest(presented, hashes[0])
    is_former = hmac.compare_digest(presented, hashes[1] or _NO_HASH)
    if found is None:
        return KeyCheck(None, "no key was shown" if not token else "what was shown is no key")
    if key is None:
        return KeyCheck(None, f"there is no key {key_id}")
    if not (is_current or is_former):
        return KeyCheck(None, f"key {key_id} has another secret")
    if (state := key.state(now)) != "active":
        return KeyCheck(key_id, f"the key is {state}")
    if is_current or (key.former_until is not None and now < key.former_until):
        return KeyCheck(key_id, None)
    return KeyCheck(key_id, "the secret was rotated out")


def valid_key_id(keys: Mapping[str, Key], token: str, now: datetime) -> str | None:
    """Returns the id of the key if the token is a valid key now; else None."""
    key_id, problem = check_token(keys, token, now)
    return key_id if problem is None else None


def id_in(given: str) -> str:
    """Returns the id from an id or a whole key, such as a leaked one."""
    found = _WHOLE.match(given)
    return found[1] if found else given


def check_scopes(scopes: tuple[str, ...]) -> tuple[Scope, ...]:
    """Validates words as scopes."""
    for each in scopes:
        if each not in SCOPES:
            remedy = f"there are these: {join_words(SCOPES)}; say --scope once for each{did_you_mean(each, SCOPES)}"
            raise Invalid("scope", each, remedy)
    if not scopes:
        raise Invalid("scope", "", f"give one or more of {join_words(SCOPES)}")
    return tuple(each for each in SCOPES if each in scopes)


def check_patterns(queues: tuple[str, ...]) -> tuple[str, ...]:
    """Validates words as names of queues, or patterns of them."""
    for each in queues:
        if not _PATTERN.fullmatch(each):
            raise Invalid("queue", each, "give a queue's name, in which * stands for any letters and ? for one")
    return queues


def _check_name(name: str) -> str:
    if not 1 <= len(name) <= _MAX_NAME or not is_printable_line(name) or not name.strip():
        raise Invalid("name", name, f"give a name of 1 to {_MAX_NAME} visible characters")
    return name


def _hash(secret: str) -> str:
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Principal of a request. ``key``: the id of its key; None if the API needs no keys and allows everything.

    ``queues``: names, or patterns in which ``*`` stands for any letters and ``?`` for one.
    """

    key: str | None = None
    scopes: frozenset[Scope] = frozenset(SCOPES)
    queues: tuple[str, ...] = (EVERY_QUEUE,)
    address: str = ""

    @property
    def name(self) -> str:
        """Returns the principal's name, for logs and records."""
        return "local" if self.key is None else self.key

    @property
    def is_restricted(self) -> bool:
        """Returns True if the key is limited to some queues."""
        return EVERY_QUEUE not in self.queues

    def has_scope(self, scope: Scope) -> bool:
        """Returns True if the key allows operations of this scope."""
        return scope in self.scopes or "admin" in self.scopes

    def allows_queue(self, queue: str) -> bool:
        """Returns True if the key allows this queue."""
        return any(fnmatchcase(queue, pattern) for pattern in self.queues)

    def check_queue(self, queue: str) -> None:
        """Refuses a queue that the key does not allow."""
        if not self.allows_queue(queue):
            raise _forbidden(f"queue {queue} is not one of this key's: {self._theirs}", "name another queue")

    def check_unlimited(self) -> None:
        """Refuses an operation on every queue if the key is limited to some."""
        if self.is_restricted:
            detail = f"this concerns every queue, and this key is limited to {self._theirs}"
            raise _forbidden(detail, "use a key for every queue")

    def own_queue(self, queue: str | None) -> str | None:
        """Returns the queue of a filter: the named one, or the only one that the key allows; None: all.

        A key that allows several queues must name one.
        """
        if queue is not None:
            self.check_queue(queue)
            return queue
        if not self.is_restricted:
            return None
        (only, *others) = self.queues
        if others or "*" in only or "?" in only:
            raise _forbidden(f"this key is limited to queues {self._theirs}", "say which with queue")
        return only

    @property
    def _theirs(self) -> str:
        return join_words(self.queues)


class ConsoleUser(msgspec.Struct, frozen=True, kw_only=True):
    """A person whom the application around the console has signed in.

    name: 1 to 100 visible characters; audit records have it. scopes and queues: as of a key (``holdfast keys create``).
    Raises Invalid if one of them is not possible.
    """

    name: str
    scopes: tuple[str, ...] = ("read",)
    queues: tuple[str, ...] = (EVERY_QUEUE,)

    def __post_init__(self) -> None:
        _check_name(self.name)
        check_scopes(self.scopes)
        if not check_patterns(self.queues):
            raise Invalid("queues", self.queues, 'give one or more; ("*",) is every queue')

    def to_principal(self, address: str) -> Principal:
        """Returns the principal of a request from this address."""
        scopes = frozenset(check_scopes(self.scopes))
        return Principal(key=f"user:{self.name}", scopes=scopes, queues=self.queues, address=address)


FindUser = Callable[[MutableMapping[str, Any]], ConsoleUser | Awaitable[ConsoleUser | None] | None]
"""Finds the user of a request from its ASGI scope; None: no user is signed in."""


def unauthorized_refusal() -> Refusal:
    """Returns the same refusal for every missing or invalid key."""
    header = (b"www-authenticate", b'Bearer realm="holdfast"')
    remedy = "send Authorization: Bearer hf_…; `holdfast keys create` makes keys"
    return Refusal(401, "unauthorized", "a key that is good is needed", remedy, header)


def _forbidden(detail: str, remedy: str) -> Refusal:
    return Refusal(403, "forbidden", detail, remedy)
