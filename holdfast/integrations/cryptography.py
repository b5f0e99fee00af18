"""A codec that encrypts payloads and results with AES-256-GCM: ``pip install 'holdfast[encryption]'``."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Mapping

from holdfast.core.encryption import KEY_BYTES, Codec, check_key_id, new_key
from holdfast.core.errors import ConfigError

try:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:
    raise ConfigError("AesGcmCodec needs the package cryptography: pip install 'holdfast[encryption]'") from error

__all__ = ["AesGcmCodec", "Codec", "new_key"]

_NONCE_BYTES = 12


class AesGcmCodec:
    """Encrypts with AES-256-GCM. ``keys``: by their ids, as base64 text or 32 bytes; the first encrypts, all decrypt.

    ``unique_secret``: a further key, never rotated, under which the arguments of unique jobs are hashed; only programs
    that submit those need it.
    """

    def __init__(self, keys: Mapping[str, str | bytes], *, unique_secret: str | bytes | None = None) -> None:
        if not keys:
            raise ConfigError("codec: there are no keys; give at least one: AesGcmCodec({'2030-01': key})")
        self._ciphers = {
            check_key_id(key_id): AESGCM(_parse_key(key, f"key {key_id!r}")) for key_id, key in keys.items()
        }
        self._key_id = next(iter(self._ciphers))
        self._unique_secret = None if unique_secret is None else _parse_key(unique_secret, "unique_secret")

    @classmethod
    def from_text(cls, text: str, *, unique_secret: str | bytes | None = None) -> AesGcmCodec:
        """Returns a codec with keys from text such as an environment variable: ``2030-02:BASE64,2030-01:BASE64``."""
        keys: dict[str, str] = {}
        for entry in text.split(","):
            key_id, separator, key = entry.strip().partition(":")
            if not separator or key_id in keys:
                position = f"entry {len(keys) + 1} of the keys"  # not its text: it may be a key
                raise ConfigError(f"codec: {position} is not valid; give ID:BASE64 once for each key, comma between")
            keys[key_id] = key
        return cls(keys, unique_secret=unique_secret)

    def __repr__(self) -> str:
        return f"<AesGcmCodec {', '.join(self._ciphers)}>"

    @property
    def key_id(self) -> str:
        """Returns the id of the key for new texts."""
        return self._key_id

    def encode(self, text: bytes, context: bytes) -> bytes:
        """Encrypts with the first key: a random nonce, then ciphertext and tag."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._ciphers[self._key_id].encrypt(nonce, text, context)

    def decode(self, data: bytes, key_id: str, context: bytes) -> bytes:
        """Decrypts. Raises KeyError for an unknown key id, InvalidTag for data of another key or context."""
        return self._ciphers[key_id].decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], context)

    def hash_text(self, text: bytes) -> str:
        """Returns the HMAC-SHA-256 of a text under ``unique_secret``."""
        if self._unique_secret is None:
            raise ConfigError(
                "codec: unique jobs need a secret of their own, so that their arguments cannot be guessed from a hash: "
                "AesGcmCodec(keys, unique_secret=new_key())"
            )
        return hmac.new(self._unique_secret, text, hashlib.sha256).hexdigest()


def _parse_key(key: str | bytes, name: str) -> bytes:
    """Returns the bytes of a key. Raises ConfigError, without the key, for any but 32 bytes."""
    try:
        data = base64.b64decode(key.strip(), validate=True) if isinstance(key, str) else bytes(key)
    except (binascii.Error, ValueError, TypeError):
        data = b""
    if len(data) != KEY_BYTES:
        raise ConfigError(
            f"codec: {name} is not valid; give {KEY_BYTES} random bytes or their base64 text: "
            "`holdfast encryption new-key` prints one"
        )
    return data
