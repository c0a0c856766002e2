"""What the store's clients and server say to each other. Pure: bytes in, values out.

A frame is its body's length (32 bits, big-endian) and the body. A connection begins with the handshake: Hello,
Challenge, Proof, then Welcome; Refused instead of any answer. After it come requests, one at a time, each with its
answer. With a cluster token every body after the handshake ends in an HMAC (see auth.py).

Every parser takes foreign bytes: it checks all bounds, and WireError is the only exception that it raises.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TypeVar

MAGIC = b"te-rdzv\x01"  # the last byte is the version
NONCE_BYTES = 32
PROOF_BYTES = 32
EMPTY_PROOF = b"\0"  # sent where no token is used
LENGTH_BYTES = 4

MOST_KEY_BYTES = 1024
MOST_KEYS = 1 << 16
MOST_VALUE_BYTES = 16 << 20
MOST_HANDSHAKE_BYTES = 4096
MOST_FRAME_BYTES = 64 << 20
REPLY_BYTES = 32 << 20  # values that go into one answer, beyond its first one

_MOST_RANKS = 1 << 20

_Enum = TypeVar("_Enum", bound=enum.IntEnum)


class WireError(ValueError):
    """Bytes that are no message of this protocol."""


class Request(enum.IntEnum):
    """The first byte of a request."""

    SET = 1
    GET = 2
    WAIT = 3
    ADD = 4
    CHECK = 5
    DELETE = 6
    WHO = 7
    BYE = 8


class Reply(enum.IntEnum):
    """The first byte of an answer."""

    DONE = 1
    VALUES = 2
    NUMBER = 3
    FLAGS = 4
    RANKS = 5
    LATE = 6  # the keys did not come in time
    FAILED = 7
    CHALLENGE = 16
    WELCOME = 17
    REFUSED = 18


class Refusal(enum.IntEnum):
    """Why a server does not let a client in."""

    OTHER_JOB = 1
    TOKEN = 2
    WORLD_SIZE = 3
    RANK_TAKEN = 4
    FULL = 5
    VERSION = 6


class Presence(enum.IntEnum):
    """What a server knows of a rank."""

    CONNECTED = 1
    LEFT = 2
    LOST = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """Who comes. `authenticated`: it has a cluster token and will not go on without a proof."""

    job: str
    rank: int
    world_size: int
    nonce: bytes
    authenticated: bool

    def encode(self) -> bytes:
        """As a body."""
        head = struct.pack(">8sBII", MAGIC, self.authenticated, self.rank, self.world_size)
        return head + self.nonce + _text(self.job)


def decode_hello(body: bytes) -> Hello:
    """Raises WireError unless it is one."""
    reader = _Reader(body)
    if reader.take(len(MAGIC)) != MAGIC:
        raise WireError("not the greeting of a rendezvous client of this version")
    authenticated, rank, world_size = reader.byte(), reader.number(), reader.number()
    nonce, job = reader.take(NONCE_BYTES), reader.text()
    reader.end()
    if authenticated > 1 or not 0 < world_size <= _MOST_RANKS or rank >= world_size:
        raise WireError(f"a greeting of rank {rank} of {world_size}")
    return Hello(job, rank, world_size, nonce, bool(authenticated))


def encode_challenge(nonce: bytes, proof: bytes) -> bytes:
    """`proof`: the server's, empty without a token."""
    return bytes((Reply.CHALLENGE,)) + nonce + proof


def encode_refused(reason: Refusal, text: str) -> bytes:
    """As a body."""
    return bytes((Reply.REFUSED, reason)) + _text(text[:500])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says. Which fields hold something depends on `kind`."""

    kind: Reply
    values: tuple[bytes, ...] = ()
    number: int = 0
    flags: tuple[bool, ...] = ()
    ranks: tuple[tuple[int, Presence, float], ...] = ()  # rank, presence, seconds since the last change
    nonce: bytes = b""
    proof: bytes = b""
    text: str = ""
    refusal: Refusal | None = None


def encode_answer(answer: Answer) -> bytes:
    """An answer to a request."""
    head = bytes((answer.kind,))
    if answer.kind is Reply.VALUES:
        parts = [head, struct.pack(">I", len(answer.values))]
        for value in answer.values:
            parts += (struct.pack(">I", len(value)), value)
        return b"".join(parts)
    if answer.kind is Reply.NUMBER:
        return head + struct.pack(">q", answer.number)
    if answer.kind is Reply.FLAGS:
        return head + struct.pack(">I", len(answer.flags)) + bytes(answer.flags)
    if answer.kind is Reply.RANKS:
        entries = (
            struct.pack(">IBI", rank, state, min(int(age * 1e3), 0xFFFFFFFF)) for rank, state, age in answer.ranks
        )
        return head + struct.pack(">I", len(answer.ranks)) + b"".join(entries)
    if answer.kind is Reply.FAILED:
        return head + _text(answer.text[:500])
    return head


def decode_answer(body: bytes) -> Answer:
    """Raises WireError unless it is one."""
    reader = _Reader(body)
    kind = _member(Reply, reader.byte())
    answer = Answer(kind)
    if kind is Reply.VALUES:
        answer = Answer(kind, values=tuple(reader.value() for _ in range(reader.count(4))))
    elif kind is Reply.NUMBER:
        answer = Answer(kind, number=reader.signed())
    elif kind is Reply.FLAGS:
        answer = Answer(kind, flags=tuple(flag != 0 for flag in reader.take(reader.count(1))))
    elif kind is Reply.RANKS:
        entries = (
            (reader.number(), _member(Presence, reader.byte()), reader.number() / 1e3) for _ in range(reader.count(9))
        )
        answer = Answer(kind, ranks=tuple(entries))
    elif kind is Reply.FAILED:
        answer = Answer(kind, text=reader.text())
    elif kind is Reply.CHALLENGE:
        nonce = reader.take(NONCE_BYTES)
        answer = Answer(kind, nonce=nonce, proof=reader.take(PROOF_BYTES) if reader.left else b"")
    elif kind is Reply.REFUSED:
        answer = Answer(kind, refusal=_member(Refusal, reader.byte()), text=reader.text())
    reader.end()
    return answer


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. Which fields hold something depends on `kind`."""

    kind: Request
    keys: tuple[str, ...] = ()
    value: bytes = b""
    number: int = 0
    timeout_s: float = 0.0


def encode_ask(ask: Ask) -> bytes:
    """As a body."""
    head = struct.pack(">BI", ask.kind, min(max(round(ask.timeout_s * 1e3), 0), 0xFFFFFFFF))
    parts = [head, struct.pack(">q", ask.number), struct.pack(">I", len(ask.keys))]
    parts += [_text(key) for key in ask.keys]
    return b"".join((*parts, ask.value))


def decode_ask(body: bytes) -> Ask:
    """Raises WireError unless it is one."""
    reader = _Reader(body)
    kind = _member(Request, reader.byte())
    timeout_s, number = reader.number() / 1e3, reader.signed()
    keys = tuple(reader.text() for _ in range(reader.count(2)))
    value = reader.take(reader.left)
    if any(not 0 < len(key.encode()) <= MOST_KEY_BYTES for key in keys):
        raise WireError("a key of a forbidden length")
    if len(value) > MOST_VALUE_BYTES or (value and kind is not Request.SET):
        raise WireError(f"{len(value)} bytes behind a request of kind {kind.name}")
    least, most = _KEYS[kind]
    if not least <= len(keys) <= most:
        raise WireError(f"{len(keys)} keys in a request of kind {kind.name}")
    return Ask(kind, keys, value, number, timeout_s)


_KEYS = {
    Request.SET: (1, 1),
    Request.GET: (1, MOST_KEYS),
    Request.WAIT: (1, MOST_KEYS),
    Request.ADD: (1, 1),
    Request.CHECK: (1, MOST_KEYS),
    Request.DELETE: (1, 1),
    Request.WHO: (0, 0),
    Request.BYE: (0, 0),
}  # how few and how many keys a request names


def frame(body: bytes) -> bytes:
    """A body with its length before it."""
    return struct.pack(">I", len(body)) + body


def body_length(head: bytes | bytearray | memoryview, most: int) -> int:
    """The length that a frame's first four bytes announce.

    Raises:
        WireError: nothing of this protocol is that long, or that short.
    """
    length: int = struct.unpack(">I", head[:LENGTH_BYTES])[0]
    if not 0 < length <= most:
        raise WireError(f"a frame of {length} bytes")
    return length


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    return struct.pack(">H", len(encoded)) + encoded


def _member(kind: type[_Enum], number: int) -> _Enum:
    try:
        return kind(number)
    except ValueError:
        raise WireError(f"{number} is no {kind.__name__}") from None


class _Reader:
    """Takes fields off a body; never reads past its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def take(self, length: int) -> bytes:
        if length > self.left:
            raise WireError(f"{length} bytes are announced, {self.left} are there")
        begin, self._at = self._at, self._at + length
        return self._body[begin : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def signed(self) -> int:
        return int.from_bytes(self.take(8), "big", signed=True)

    def count(self, least_bytes: int) -> int:
        """How many entries follow; each has at least so many bytes, so a false count is seen before memory is taken."""
        count = self.number()
        if count * least_bytes > self.left:
            raise WireError(f"{count} entries are announced in {self.left} bytes")
        return count

    def value(self) -> bytes:
        return self.take(self.number())

    def text(self) -> str:
        try:
            return self.take(int.from_bytes(self.take(2), "big")).decode()
        except UnicodeDecodeError:
            raise WireError("text that is no UTF-8") from None

    def end(self) -> None:
        if self.left:
            raise WireError(f"{self.left} bytes too many")
