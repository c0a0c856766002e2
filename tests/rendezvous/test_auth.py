"""The cluster token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transfer_engine as te
from transfer_engine.rendezvous import auth
from transfer_engine.rendezvous.wire import WireError


def seals(token: bytes = b"token", hello: bytes = b"hello", nonce: bytes = b"n") -> tuple[auth.Seal, auth.Seal]:
    return auth.Seal(token, "to server", hello, nonce), auth.Seal(token, "to server", hello, nonce)


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_what_is_signed_is_accepted_in_order(bodies: list[bytes]) -> None:
    signer, checker = seals()
    assert [checker.check(signer.sign(body)) for body in bodies] == bodies


@given(st.binary(max_size=50), st.integers(0, 1000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(body: bytes, position: int, change: int) -> None:
    signer, checker = seals()
    signed = bytearray(signer.sign(body))
    signed[position % len(signed)] ^= change
    with pytest.raises(WireError):
        checker.check(bytes(signed))


def test_a_repeated_message_is_refused() -> None:
    signer, checker = seals()
    signed = signer.sign(b"add 1")
    checker.check(signed)
    with pytest.raises(WireError):
        checker.check(signed)


def test_a_message_left_out_or_moved_is_noticed() -> None:
    signer, checker = seals()
    signer.sign(b"first")
    with pytest.raises(WireError):
        checker.check(signer.sign(b"second"))


@pytest.mark.parametrize(
    "other",
    [
        auth.Seal(b"another", "to server", b"hello", b"n"),
        auth.Seal(b"token", "to client", b"hello", b"n"),
        auth.Seal(b"token", "to server", b"hullo", b"n"),
        auth.Seal(b"token", "to server", b"hello", b"m"),
    ],
    ids=["token", "direction", "greeting", "nonce"],
)
def test_signatures_hold_for_one_token_direction_and_connection(other: auth.Seal) -> None:
    with pytest.raises(WireError):
        other.check(seals()[0].sign(b"body"))


def test_a_signature_shorter_than_it_is_refused() -> None:
    with pytest.raises(WireError):
        seals()[1].check(b"short")


def test_proofs_of_both_sides_differ() -> None:
    assert auth.proof(b"t", "client", b"hello", b"n") != auth.proof(b"t", "server", b"hello", b"n")


def test_the_token_comes_from_the_variable_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from a file\n")
    assert auth.cluster_token({}) is None
    assert auth.cluster_token({"TE_CLUSTER_TOKEN_FILE": str(file)}) == b"from a file"
    assert auth.cluster_token({"TE_CLUSTER_TOKEN": "x", "TE_CLUSTER_TOKEN_FILE": str(file)}) == b"x"


def test_a_token_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(te.ConfigError, match="No such file"):
        auth.cluster_token({"TE_CLUSTER_TOKEN_FILE": str(tmp_path / "absent")})
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(te.ConfigError, match="is empty"):
        auth.cluster_token({"TE_CLUSTER_TOKEN_FILE": str(tmp_path / "empty")})
