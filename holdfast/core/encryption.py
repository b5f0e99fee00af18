"""Encrypted payloads and results: the codec of an application, and the JSON object that stands for a text in a store.

The object is ``{"$encrypted": {"key": KEY ID, "data": BASE64}}``, so every store, the HTTP API and programs without the
key pass it on like any other payload. Each text is bound to its *context*, such as its job and task, as associated
data: it cannot be decrypted anywhere else.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from holdfast.core.errors import ConfigError, DecryptionFailed, HoldfastError

MARKER = "$encrypted"
"""Field that marks the object of an encrypted text. Other fields beside it are readable copies of arguments."""

KEY_BYTES = 32

_MARKED = re.compile(r'\s*\{\s*"\$encrypted"\s*:').match
_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z").match


class Codec(Protocol):
    """Encrypts texts before they reach the store, and decrypts them, as ``integrations/cryptography.py`` does.

    Called in the event loop, once or twice a job: it does no I/O. ``context`` is associated data: not stored, and the
    same for ``encode`` and ``decode`` of a text.
    """

    @property
    def key_id(self) -> str:
        """Id of the key for new texts: up to 64 letters, digits, ``.``, ``_`` and ``-``. Stored in the clear."""

    def encode(self, text: bytes, context: bytes) -> bytes:
        """Encrypts with the key ``key_id``."""

    def decode(self, data: bytes, key_id: str, context: bytes) -> bytes:
        """Decrypts. Raises KeyError for an unknown key id, and any other exception for data that is not of this key
        and context."""

    def hash_text(self, text: bytes) -> str:
        """Hashes under a secret that stays when keys are rotated; for unique keys, which are made of arguments."""


class _Encrypted(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    key: str
    data: str
    of: str = "job"  # "unique": bound to the unique key, as the store may give it to the job that has the key


class _Envelope(msgspec.Struct, frozen=True, gc=False):
    encrypted: _Encrypted = msgspec.field(name=MARKER)


_decode = msgspec.json.Decoder(_Envelope).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def check_key_id(key_id: object) -> str:
    """Returns the id of a key. Raises ConfigError for what cannot be one, unquoted: it may be the key itself."""
    if not isinstance(key_id, str) or not _KEY_ID(key_id):
        raise ConfigError(
            "codec: a key id is not valid; give up to 64 letters, digits, '.', '_' and '-', as in 2030-01"
        )
    return key_id


def check_readable(names: Collection[str]) -> frozenset[str]:
    """Returns the names of arguments that stay in the clear. Raises ConfigError for anything but a list of names."""
    if isinstance(names, str) or MARKER in names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"readable: {names!r} is not valid; give a list of names of arguments, as in ['clinic']")
    return frozenset(names)


def new_key() -> str:
    """Returns a new random key, as base64 text."""
    return base64.b64encode(os.urandom(KEY_BYTES)).decode()


# ── contexts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def job_context(job_id: str, task: str) -> bytes:
    """Context of a job's payload."""
    return _encode(["payload", job_id, task])


def unique_context(unique_key: str, task: str) -> bytes:
    """Context of a payload that a later submission may give to the job with the same unique key."""
    return _encode(["unique", unique_key, task])


def result_context(job_id: str) -> bytes:
    """Context of a job's result."""
    return _encode(["result", job_id])


def step_context(job_id: str, name: str) -> bytes:
    """Context of a step's result, or of a value that a handler keeps with its job."""
    return _encode(["step", job_id, name])


def signal_context(topic: str) -> bytes:
    """Context of a signal's value."""
    return _encode(["signal", topic])


def schedule_context(name: str, task: str) -> bytes:
    """Context of the payload of a schedule."""
    return _encode(["schedule", name, task])


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def is_encrypted(text: str) -> bool:
    """Returns True for JSON text that begins as an encrypted text does, even if it is damaged."""
    return _MARKED(text) is not None


def key_id_of(text: str) -> str | None:
    """Returns the id of the key of an encrypted text; None for any other text, and for a damaged one."""
    envelope = _read(text)
    return None if envelope is None else envelope.key


def describe_encrypted(text: str) -> str:
    """Placeholder of an encrypted text, for people without the key: ``[encrypted with key 2030-01]``."""
    key_id = key_id_of(text)
    return "[encrypted, and damaged]" if key_id is None else f"[encrypted with key {key_id}]"


def require_decrypted(text: str, what: str) -> str:
    """Returns a text that is not encrypted. Raises DecryptionFailed, which names ``what``, for one that still is."""
    if is_encrypted(text):
        raise DecryptionFailed(f"{what} is {describe_encrypted(text)}, and this program could not decrypt it")
    return text


def uses_unique_key(text: str) -> bool:
    """Returns True if an encrypted text is bound to a unique key."""
    envelope = _read(text)
    return envelope is not None and envelope.of == "unique"


def _read(text: str) -> _Encrypted | None:
    if not is_encrypted(text):
        return None
    try:
        found = _decode(text).encrypted
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return found if _KEY_ID(found.key) else None


def encrypt_text(
    codec: Codec, text: str, context: bytes, *, readable: Collection[str] = (), unique: bool = False
) -> str:
    """Encrypts JSON text. One that is encrypted already is returned as it is: another program has the key.

    ``readable``: fields to be left in the clear beside it. ``unique``: the context is that of a unique key. Raises
    HoldfastError, without its text, for any exception of the codec: callers in workers handle no other.
    """
    if key_id_of(text) is not None:
        return text
    try:
        key_id = check_key_id(codec.key_id)  # another one could not be read again
        data = base64.b64encode(codec.encode(text.encode(), context)).decode()
    except Exception as error:
        raise HoldfastError(f"the codec could not encrypt ({type(error).__name__})") from error
    fields: dict[str, Any] = {MARKER: _Encrypted(key=key_id, data=data, of="unique" if unique else "job")}
    if readable:
        with suppress(msgspec.DecodeError, RecursionError):  # a stored text that is damaged has no fields to copy
            fields |= {name: value for name, value in _decode_fields(text).items() if name in readable}
    return _encode(fields).decode()


def decrypt_text(codec: Codec | None, text: str, context: bytes, what: str) -> str:
    """Decrypts a text; returns any other as it is. Raises DecryptionFailed, which names ``what``."""
    if not is_encrypted(text):
        return text
    envelope = _read(text)
    if envelope is None:
        raise DecryptionFailed(f"{what} is marked as encrypted, and damaged: it is not what a codec has written")
    key = f"key {envelope.key!r}"
    if codec is None:
        raise DecryptionFailed(
            f"{what} is encrypted with {key}, and this program has no codec; give it one: Holdfast(…, codec=…)"
        )
    try:
        return codec.decode(base64.b64decode(envelope.data, validate=True), envelope.key, context).decode()
    except KeyError:
        raise DecryptionFailed(
            f"{what} is encrypted with {key}, which this program does not have; add that key to its codec"
        ) from None
    except binascii.Error:
        raise DecryptionFailed(f"{what} is encrypted with {key}, and damaged: its data is not base64") from None
    except Exception as error:
        raise DecryptionFailed(
            f"{what} cannot be decrypted with {key} ({type(error).__name__}): it was changed, or moved from another "
            "job, task or step, or this program has another key under that id"
        ) from error
