"""The cluster token: who knows it may join. Pure, but for reading the token and for random bytes.

Both sides prove that they know the token over both sides' nonces, so nothing that was heard before can be played again;
the labels differ by direction, so nothing can be played back. Then each body carries an HMAC over its direction, its
number and its content, with keys that belong to this connection alone. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from .wire import NONCE_BYTES, PROOF_BYTES, WireError

TOKEN = "TE_CLUSTER_TOKEN"
TOKEN_FILE = "TE_CLUSTER_TOKEN_FILE"
_MOST_TOKEN_BYTES = 4096


def cluster_token(environment: Mapping[str, str] | None = None) -> bytes | None:
    """The token from TE_CLUSTER_TOKEN, or from the file that TE_CLUSTER_TOKEN_FILE names; None: there is none.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    environment = os.environ if environment is None else environment
    if environment.get(TOKEN):
        return environment[TOKEN].encode()
    name = environment.get(TOKEN_FILE)
    if not name:
        return None
    try:
        with Path(name).open("rb") as file:
            token = file.read(_MOST_TOKEN_BYTES).strip()
    except OSError as cause:
        raise ConfigError(
            f"environment variable {TOKEN_FILE}: {name}: {cause.strerror}", operation="Rendezvous"
        ) from None
    if not token:
        raise ConfigError(f"environment variable {TOKEN_FILE}: {name} is empty", operation="Rendezvous")
    return token


def nonce() -> bytes:
    """Random bytes that are never used twice."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: bytes, side: str, hello: bytes, server_nonce: bytes) -> bytes:
    """That `side` ("client" or "server") knows the token. `hello` holds the client's nonce."""
    return _mac(token, f"transfer_engine rendezvous {side}".encode(), hello + server_nonce)


def equal(one: bytes, other: bytes) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(one, other)


class Seal:
    """Signs one direction of a connection, or checks it."""

    def __init__(self, token: bytes, direction: str, hello: bytes, server_nonce: bytes) -> None:
        self._key = _mac(token, f"transfer_engine rendezvous key {direction}".encode(), hello + server_nonce)
        self._number = 0

    def sign(self, body: bytes) -> bytes:
        """The body with its HMAC behind it."""
        return body + self._next(body)

    def check(self, signed: bytes) -> bytes:
        """The body without its HMAC.

        Raises:
            WireError: it was altered, repeated, left out, or comes from somebody else.
        """
        body, tag = signed[:-PROOF_BYTES], signed[-PROOF_BYTES:]
        if not equal(tag, self._next(body)):
            raise WireError("a message without a valid signature")
        return body

    def _next(self, body: bytes) -> bytes:
        self._number += 1
        return _mac(self._key, self._number.to_bytes(8, "big"), body)


def _mac(key: bytes, label: bytes, content: bytes) -> bytes:
    """The label's length is part of it, so that no two pairs of label and content look the same."""
    return hmac.new(key, len(label).to_bytes(2, "big") + label + content, hashlib.sha256).digest()
