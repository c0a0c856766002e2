"""The bytes of docs/handshake.md, written from that document alone: little-endian fields without padding."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

OFFER, BYE, REFUSE = 1, 2, 3
STALE, UNKNOWN, FULL, VERSION = 1, 2, 3, 4
HELLO, HELLO_ACK, REJECT, RECORDS, FRAGMENT, ACK, PING, PONG = range(1, 9)
ATTACH_REGION, REGION_ATTACHED, ATTACH_COUNTER, COUNTER_ATTACHED, REVOKE_REGION, REGION_REVOKED = range(1, 7)
REVOKE_COUNTER, COUNTER_REVOKED, SLOTS, RETIRE_SLOT, FENCE, FENCED, BYE_SAID, BYE_DONE, WRITE_OFF = range(7, 16)
GRANTED = 1

NIC = struct.Struct("<BBHIIQ16s")
HEADER = struct.Struct("<HBBIQIIQII")
MAGIC, MESSAGE_MAGIC = 0x51583774, 0x7E51
MESSAGE_VERSION = 2
HANDSHAKE_BYTES = 128


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def sealed(data: bytes) -> bytes:
    return data + struct.pack("<I", crc32c(data))


def unsealed(data: bytes) -> bytes:
    if len(data) < 4 or sealed(data[:-4]) != data:
        raise ValueError("the checksum does not match")
    return data[:-4]


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> Any:
        """One value, or a tuple of several."""
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values[0] if len(values) == 1 else values

    @property
    def done(self) -> bool:
        return self.at == len(self.data)


@dataclass(frozen=True)
class Nic:
    gid: bytes
    queue_pair: int
    queue_key: int
    cookie: int
    lid: int = 0
    ethernet: int = 1

    def pack(self) -> bytes:
        return NIC.pack(1, self.ethernet, self.lid, self.queue_pair, self.queue_key, self.cookie, self.gid)

    @classmethod
    def unpack(cls, data: bytes) -> Nic:
        version, ethernet, lid, queue_pair, queue_key, cookie, gid = NIC.unpack(data)
        if version != 1:
            raise ValueError(f"a NIC address of version {version}")
        return cls(gid, queue_pair, queue_key, cookie, lid, ethernet)


@dataclass
class Handshake:
    kind: int
    sender: Nic
    target_cookie: int
    identity: bytes = bytes(16)
    generation: int = 0
    target_generation: int = 0
    attempt: int = 0
    echo: int = 0
    ready: int = 0
    refusal: int = 0
    numbers: tuple[int, int] = (0, 0)
    sequences: tuple[int, int] = (0, 0)
    mtu: int = 0
    reads: int = 0
    version: int = 1

    def pack(self) -> bytes:
        return sealed(
            struct.pack("<IBBBB", MAGIC, self.version, self.kind, self.ready, self.refusal)
            + self.sender.pack()
            + struct.pack("<Q16sQQQQ", self.target_cookie, self.identity, self.generation, self.target_generation,
                          self.attempt, self.echo)
            + struct.pack("<IIIIBB6x", *self.numbers, *self.sequences, self.mtu, self.reads)
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> Handshake:
        reader = Reader(unsealed(data[:HANDSHAKE_BYTES]))
        magic, version, kind, ready, refusal = reader.take("IBBBB")
        if magic != MAGIC:
            raise ValueError("no message of the handshake")
        sender = Nic.unpack(reader.take("36s"))
        cookie, identity, generation, target_generation, attempt, echo = reader.take("Q16sQQQQ")
        one, two, first, second, mtu, reads = reader.take("IIIIBB")
        return cls(kind, sender, cookie, identity, generation, target_generation, attempt, echo, ready, refusal,
                   (one, two), (first, second), mtu, reads, version)  # fmt: skip


@dataclass(frozen=True)
class Address:
    identity: bytes
    generation: int
    nics: tuple[bytes, ...]

    def pack(self) -> bytes:
        nics = b"".join(struct.pack("<B", len(nic)) + nic for nic in self.nics)
        return struct.pack("<16sQB3sB", self.identity, self.generation, 3, b"cx7", len(self.nics)) + nics

    @classmethod
    def take(cls, reader: Reader) -> Address:
        identity, generation, length = reader.take("16sQB")
        if reader.take(f"{length}s") != b"cx7":
            raise ValueError("an address of another transport")
        nics = [reader.take(f"{reader.take('B')}s") for _ in range(reader.take("B"))]
        return cls(identity, generation, tuple(nics))


def opened(data: bytes, kind: bytes) -> Reader:
    """The body of an address or descriptor, behind its four bytes of head."""
    body = unsealed(data)
    if body[:4] != b"te" + kind + b"\x01":
        raise ValueError(f"it begins with {body[:4]!r}")
    return Reader(body[4:])


@dataclass(frozen=True)
class RegionDescriptor:
    address: Address
    serial: int
    length: int
    keys: tuple[tuple[int, int], ...]  # base and key, per NIC

    def pack(self) -> bytes:
        keys = b"".join(struct.pack("<QQ", *key) for key in self.keys)
        return sealed(b"ter\x01" + self.address.pack() + struct.pack("<QQii", self.serial, self.length, 0, 0) + keys)

    @classmethod
    def unpack(cls, data: bytes) -> RegionDescriptor:
        reader = opened(data, b"r")
        address = Address.take(reader)
        serial, length, _, _ = reader.take("QQii")
        return cls(address, serial, length, tuple(reader.take("QQ") for _ in address.nics))


@dataclass(frozen=True)
class CounterDescriptor:
    address: Address
    serial: int

    def pack(self) -> bytes:
        return sealed(b"tec\x01" + self.address.pack() + struct.pack("<Q", self.serial))

    @classmethod
    def unpack(cls, data: bytes) -> CounterDescriptor:
        reader = opened(data, b"c")
        return cls(Address.take(reader), reader.take("Q"))


@dataclass
class Header:
    type: int
    target_index: int = 0xFFFFFFFF
    token: int = 0
    sequence: int = 0
    acknowledged: int = 0
    consumed_bytes: int = 0
    first: int = 0

    def pack(self, body: bytes) -> bytes:
        head = HEADER.pack(MESSAGE_MAGIC, MESSAGE_VERSION, self.type, self.target_index, self.token, self.sequence,
                           self.acknowledged, self.consumed_bytes, len(body), self.first)  # fmt: skip
        return head + body

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Header, bytes]:
        magic, version, kind, index, token, sequence, acknowledged, consumed, length, first = HEADER.unpack_from(data)
        if (magic, version, length) != (MESSAGE_MAGIC, MESSAGE_VERSION, len(data) - HEADER.size):
            raise ValueError("no message")
        return cls(kind, index, token, sequence, acknowledged, consumed, first), data[HEADER.size :]


@dataclass
class Hello:
    target_identity: bytes
    target_generation: int
    sender: Address
    sender_index: int
    sender_token: int
    session: int
    echo_token: int = 0
    immediate_window: int = 16
    message_window: int = 16
    fragment_bytes: int = 4096
    message_queue_bytes: int = 1 << 16
    max_message_bytes: int = 1 << 12
    slots: list[int] = field(default_factory=list)

    def pack(self) -> bytes:
        return sealed(
            struct.pack("<16sQ", self.target_identity, self.target_generation)
            + self.sender.pack()
            + struct.pack("<IQQIIIIQQ", self.sender_index, self.sender_token, self.echo_token, self.session,
                          self.immediate_window, self.message_window, self.fragment_bytes, self.message_queue_bytes,
                          self.max_message_bytes)
            + struct.pack(f"<H{len(self.slots)}H", len(self.slots), *self.slots)
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        reader = Reader(unsealed(data))
        identity, generation = reader.take("16sQ")
        sender = Address.take(reader)
        index, token, echo, session, immediates, messages, fragment, queue, longest = reader.take("IQQIIIIQQ")
        slots = [reader.take("H") for _ in range(reader.take("H"))]
        if not reader.done:
            raise ValueError("a hello that is too long")
        return cls(identity, generation, sender, index, token, session, echo, immediates, messages, fragment, queue,
                   longest, slots)  # fmt: skip


def take_record(reader: Reader) -> dict[str, Any]:
    """One record of a body of records."""
    kind = reader.take("B")
    record: dict[str, Any] = {"type": kind}
    if kind not in (SLOTS, RETIRE_SLOT, BYE_SAID, BYE_DONE, WRITE_OFF):
        record["serial"] = reader.take("Q")
    if kind == REGION_ATTACHED:
        record["granted"], record["length"], record["slot_bytes"], count = reader.take("BQIB")
        record["keys"] = [reader.take("QQ") for _ in range(count)]
    elif kind == COUNTER_ATTACHED:
        record["granted"], record["id"], record["index"] = reader.take("BHH")
    elif kind == REVOKE_REGION:
        record["temporary"] = reader.take("B")
    elif kind == SLOTS:
        record["ids"] = [reader.take("H") for _ in range(reader.take("H"))]
    elif kind == RETIRE_SLOT:
        record["id"], record["delivered"], record["unknown"] = reader.take("HBB")
    elif kind == FENCED:
        record["granted"] = reader.take("B")
    elif kind == BYE_SAID:
        record["for_good"] = reader.take("B")
    elif kind == WRITE_OFF:
        record["nic"], record["count"] = reader.take("BH")
    return record
