"""A peer of an engine on transport cx7 that shares no code with it: one NIC, over pyverbs, as docs/handshake.md says.

A program of its own for the system's Python. Requests and answers are as those of player.py; between them it goes on
answering what comes.
"""

from __future__ import annotations

import dataclasses
import json
import random
import secrets
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import foreign_wire as wire
import pyverbs.enums as e
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

DEADLINE_S = 60.0
REPEAT_S = 0.1
GID_INDEX = 1  # RoCEv2 over IPv4
MTU_4096 = 5
MESSAGES, WRITES = 0, 1
GUARD, POISON = 4096, b"\xa5"
LENGTH = 1 << 16
GRH, DATAGRAMS = 40, 32
RECEIVES = 32
RECEIVE_BYTES = 4096  # what its hello grants
SENT = 1 << 32  # in wr_id
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON takes it."""

    def convert(item: Any) -> Any:
        if isinstance(item, bytes):
            return item.hex()
        if isinstance(item, dict):
            return {name: convert(part) for name, part in item.items()}
        return [convert(part) for part in item] if isinstance(item, (list, tuple)) else item

    return dict(convert(dataclasses.asdict(value)))


class Pairs:
    """Two queue pairs under one attempt."""

    def __init__(self, station: Station, attempt: int) -> None:
        self.attempt = attempt
        self.theirs = 0  # the attempt to which they are bound
        self.up = False
        self.sequences = (secrets.randbits(24), secrets.randbits(24))
        capacity = QPCap(max_send_wr=64, max_recv_wr=2 * RECEIVES)
        options = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=station.cq, rcq=station.cq, cap=capacity, sq_sig_all=1)
        self.qps = [QP(station.pd, options) for _ in (MESSAGES, WRITES)]
        for qp in self.qps:
            change = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=1)
            change.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
            qp.modify(change, e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS)

    @property
    def numbers(self) -> tuple[int, int]:
        return self.qps[0].qp_num, self.qps[1].qp_num

    def bind(self, station: Station, offer: wire.Handshake) -> None:
        self.theirs = offer.attempt
        for kind, qp in enumerate(self.qps):
            change = QPAttr(qp_state=e.IBV_QPS_RTR, port_num=1)
            change.path_mtu = min(MTU_4096, offer.mtu)
            change.dest_qp_num = offer.numbers[kind]
            change.rq_psn = offer.sequences[kind]
            change.max_dest_rd_atomic = 1
            change.min_rnr_timer = 12
            change.ah_attr = station.route(offer.sender)
            qp.modify(
                change,
                e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN
                | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER,
            )  # fmt: skip
            change = QPAttr(qp_state=e.IBV_QPS_RTS, port_num=1)
            change.timeout, change.retry_cnt, change.rnr_retry = 16, 7, 7
            change.sq_psn = self.sequences[kind]
            change.max_rd_atomic = 1
            qp.modify(
                change,
                e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY | e.IBV_QP_SQ_PSN
                | e.IBV_QP_MAX_QP_RD_ATOMIC,
            )  # fmt: skip
        for index in range(RECEIVES):
            station.post_receive(self, index)
            piece = [SGE(int(station.receives.buf), 0, station.receives.lkey)]  # pyverbs wants one
            self.qps[WRITES].post_recv(RecvWR(wr_id=RECEIVES, num_sge=1, sg=piece))


class Session:
    """What the two said to each other since a hello."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.token = secrets.randbits(64)
        self.theirs: wire.Hello | None = None
        self.acknowledged = False  # our hello, or theirs by us
        self.sent = self.received = 0
        self.polled = 0
        self.records: list[dict[str, Any]] = []
        self.pongs: list[list[int]] = []


class Station:
    """One NIC with one peer at a time."""

    def __init__(self, device: str) -> None:
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq, self.datagram_cq = CQ(self.context, 512), CQ(self.context, 4 * DATAGRAMS)
        self.memory = MR(self.pd, LENGTH + 2 * GUARD, ACCESS)
        self.memory.write(POISON * (LENGTH + 2 * GUARD), LENGTH + 2 * GUARD)
        self.source = MR(self.pd, LENGTH, e.IBV_ACCESS_LOCAL_WRITE)
        self.receives = MR(self.pd, RECEIVES * RECEIVE_BYTES, e.IBV_ACCESS_LOCAL_WRITE)
        self.outgoing = MR(self.pd, 64 * RECEIVE_BYTES, e.IBV_ACCESS_LOCAL_WRITE)
        self.outgoing_next = 0
        self.datagrams = MR(self.pd, DATAGRAMS * 256, e.IBV_ACCESS_LOCAL_WRITE)
        self.open_datagrams()

        self.identity, self.generation = secrets.token_bytes(16), 1
        gid = bytes.fromhex(str(self.context.query_gid(1, GID_INDEX).gid).replace(":", ""))
        self.nic = wire.Nic(gid, self.ud.qp_num, self.queue_key, secrets.randbits(64))
        self.address = wire.Address(self.identity, self.generation, (self.nic.pack(),))
        self.version = 1  # another one refuses all offers
        self.attempts = 0
        self.pairs: Pairs | None = None
        self.former: list[Pairs] = []
        self.remote: wire.Nic | None = None
        self.target: wire.Address | None = None
        self.repeat_at = 0.0
        self.heard: list[wire.Handshake] = []
        self.sessions = 0
        self.session: Session | None = None
        self.granted_id, self.granted_index = 0xBEEF, 0
        self.immediates: list[int] = []
        self.failures: list[int] = []
        self.sends_done = 0

    # --- datagrams

    def open_datagrams(self) -> None:
        capacity = QPCap(max_send_wr=DATAGRAMS, max_recv_wr=DATAGRAMS)
        cq = self.datagram_cq
        options = QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=capacity, sq_sig_all=1)
        self.ud = QP(self.pd, options)
        self.queue_key = secrets.randbits(31)
        attributes = QPAttr(port_num=1)
        attributes.qkey = self.queue_key
        self.ud.to_rts(attributes)
        for index in range(DATAGRAMS):
            self.post_datagram(index)

    def post_datagram(self, index: int) -> None:
        piece = SGE(int(self.datagrams.buf) + 256 * index, 256, self.datagrams.lkey)
        self.ud.post_recv(RecvWR(wr_id=index, num_sge=1, sg=[piece]))

    def route(self, to: wire.Nic) -> AHAttr:
        text = ":".join(to.gid[i : i + 2].hex() for i in range(0, 16, 2))
        return AHAttr(gr=GlobalRoute(dgid=GID(text), sgid_index=GID_INDEX), is_global=1, port_num=1)

    def slot(self, data: bytes) -> list[SGE]:
        at = RECEIVE_BYTES * (self.outgoing_next % 64)
        self.outgoing_next += 1
        self.outgoing.write(data, len(data), at)
        return [SGE(int(self.outgoing.buf) + at, len(data), self.outgoing.lkey)]

    def datagram(self, to: wire.Nic, data: bytes) -> None:
        request = SendWR(wr_id=SENT, opcode=e.IBV_WR_SEND, num_sge=1, sg=self.slot(data))
        request.set_wr_ud(AH(self.pd, attr=self.route(to)), to.queue_pair, to.queue_key)
        self.ud.post_send(request)

    # --- the handshake

    def make(self) -> Pairs:
        self.attempts += 1
        if self.pairs is not None:
            self.former.append(self.pairs)
        self.pairs = Pairs(self, self.attempts)
        self.session = None
        return self.pairs

    def offer_now(self, **changes: Any) -> wire.Handshake:
        """What is true now, but for the changes."""
        assert self.remote is not None
        assert self.pairs is not None
        message = wire.Handshake(
            wire.OFFER, self.nic, self.remote.cookie, self.identity, self.generation,
            attempt=self.pairs.attempt, echo=self.pairs.theirs, ready=int(self.pairs.up),
            numbers=self.pairs.numbers, sequences=self.pairs.sequences, mtu=MTU_4096, reads=1,
        )  # fmt: skip
        return dataclasses.replace(message, **changes)

    def offer(self) -> None:
        assert self.remote is not None
        self.repeat_at = time.monotonic() + REPEAT_S
        self.datagram(self.remote, self.offer_now().pack())

    def refuse(self, message: wire.Handshake, refusal: int) -> None:
        sender = dataclasses.replace(self.nic, cookie=message.target_cookie)
        answer = wire.Handshake(wire.REFUSE, sender, message.sender.cookie, self.identity, self.generation)
        answer.refusal, answer.echo, answer.version = refusal, message.attempt, self.version
        self.datagram(message.sender, answer.pack())

    def take_handshake(self, data: bytes) -> None:
        message = wire.Handshake.unpack(data)
        self.heard.append(message)
        if message.kind != wire.OFFER:
            return None
        if message.version != self.version:
            return self.refuse(message, wire.VERSION)
        if message.target_cookie != self.nic.cookie:
            return self.refuse(message, wire.STALE)
        pairs = self.pairs
        if pairs is not None and message.attempt < pairs.theirs:
            return None
        if pairs is None or (pairs.theirs != 0 and message.attempt > pairs.theirs):
            pairs = self.make()
        self.remote = message.sender
        if message.echo not in (0, pairs.attempt):
            return self.refuse(message, wire.UNKNOWN)
        if pairs.theirs == 0:
            pairs.bind(self, message)
        pairs.up = pairs.up or message.echo == pairs.attempt
        if not (pairs.up and message.ready):
            self.offer()
        return None

    # --- messages

    def post_receive(self, pairs: Pairs, index: int) -> None:
        piece = SGE(int(self.receives.buf) + RECEIVE_BYTES * index, RECEIVE_BYTES, self.receives.lkey)
        pairs.qps[MESSAGES].post_recv(RecvWR(wr_id=index, num_sge=1, sg=[piece]))

    def say(self, kind: int, body: bytes, *, sequenced: bool = False) -> None:
        assert self.session is not None
        assert self.pairs is not None
        header = wire.Header(kind, acknowledged=self.session.received)
        if self.session.theirs is not None:
            header.target_index, header.token = self.session.theirs.sender_index, self.session.theirs.sender_token
        if sequenced:
            self.session.sent += 1
            header.sequence = self.session.sent
        request = SendWR(wr_id=SENT, opcode=e.IBV_WR_SEND, num_sge=1, sg=self.slot(header.pack(body)))
        self.pairs.qps[MESSAGES].post_send(request)

    def counts(self) -> bytes:
        assert self.session is not None
        return b"\x01" + self.session.polled.to_bytes(4, "little")

    def say_hello(self, kind: int) -> None:
        assert self.session is not None
        assert self.target is not None
        mine = wire.Hello(self.target.identity, self.target.generation, self.address, 77, self.session.token,
                          self.session.number, fragment_bytes=RECEIVE_BYTES)  # fmt: skip
        if kind == wire.HELLO_ACK and self.session.theirs is not None:
            mine.echo_token = self.session.theirs.sender_token
        self.say(kind, mine.pack())

    def new_session(self) -> Session:
        self.sessions += 1
        self.session = Session(self.sessions)
        return self.session

    def take_message(self, data: bytes) -> None:
        header, body = wire.Header.unpack(data)
        if header.type == wire.HELLO:
            hello = wire.Hello.unpack(body)
            assert (hello.target_identity, hello.target_generation) == (self.identity, self.generation)
            session = self.session or self.new_session()
            session.theirs, self.target, session.acknowledged = hello, hello.sender, True
            return self.say_hello(wire.HELLO_ACK)
        session = self.session
        assert session is not None, "a message before a hello"
        assert (header.target_index, header.token) == (77, session.token)
        if header.type == wire.HELLO_ACK:
            session.theirs = wire.Hello.unpack(body)
            assert session.theirs.echo_token == session.token
            session.acknowledged = True
        elif header.type == wire.PING:
            self.say(wire.PONG, self.counts())
        elif header.type == wire.PONG:
            session.pongs.append([int.from_bytes(body[1 + 4 * i : 5 + 4 * i], "little") for i in range(body[0])])
        elif header.type in (wire.RECORDS, wire.FRAGMENT):
            assert header.sequence == session.received + 1
            session.received = header.sequence
            reader = wire.Reader(body)
            while header.type == wire.RECORDS and not reader.done:
                self.take_record(session, wire.take_record(reader))
            self.say(wire.ACK, self.counts())
        return None

    def records(self, layout: str, *values: Any) -> None:
        self.say(wire.RECORDS, wire.struct.pack("<" + layout, *values), sequenced=True)

    def take_record(self, session: Session, record: dict[str, Any]) -> None:
        session.records.append(record)
        kind, serial = record["type"], record.get("serial")
        if kind == wire.ATTACH_REGION:
            base = int(self.memory.buf) + GUARD
            self.records("BQBQIBQQ", wire.REGION_ATTACHED, serial, wire.GRANTED, LENGTH, 0, 1, base, self.memory.rkey)
        elif kind == wire.ATTACH_COUNTER:
            granted = (wire.GRANTED, self.granted_id, self.granted_index)
            self.records("BQBHH", wire.COUNTER_ATTACHED, serial, *granted)
        elif kind in (wire.REVOKE_REGION, wire.REVOKE_COUNTER):
            self.records("BQ", kind + 1, serial)
        elif kind == wire.FENCE:
            self.records("BQB", wire.FENCED, serial, wire.GRANTED)
        elif kind == wire.BYE_SAID:
            self.records("B", wire.BYE_DONE)

    # --- what has come

    def serve(self) -> None:
        for done in self.datagram_cq.poll(8)[1]:
            if done.wr_id == SENT:
                continue
            data = bytes(self.datagrams.read(256, 256 * done.wr_id))[GRH : done.byte_len]
            self.post_datagram(done.wr_id)
            self.take_handshake(data)
        for done in self.cq.poll(16)[1]:
            self.take_completion(done)
        if self.pairs is not None and not self.pairs.up and time.monotonic() >= self.repeat_at:
            self.offer()

    def take_completion(self, done: Any) -> None:
        pairs = self.pairs
        current = pairs is not None and done.qp_num in pairs.numbers
        if done.status != e.IBV_WC_SUCCESS:
            if current:
                self.failures.append(done.status)
            return
        if done.wr_id == SENT:
            self.sends_done += 1
            return
        if not current:
            return
        assert pairs is not None
        pairs.up = True  # who sends is bound
        if done.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM:
            assert self.session is not None
            self.session.polled += 1
            self.immediates.append(socket.ntohl(done.imm_data))  # pyverbs leaves it as it travels
            return
        data = bytes(self.receives.read(done.byte_len, RECEIVE_BYTES * done.wr_id))
        self.post_receive(pairs, done.wr_id)
        self.take_message(data)


stations: list[Station] = []


def serve() -> None:
    for station in stations:
        station.serve()


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        serve()
        if found := condition():
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in time: {what}")
        time.sleep(0.0005)


def session_of(station: Station) -> Session:
    assert station.session is not None
    return station.session


# --- requests


def station(device: str, version: int = 1) -> dict[str, Any]:
    """A new one: its number, and its address and descriptors of its memory and of a counter as an engine reads them."""
    made = Station(device)
    made.version = version
    stations.append(made)
    base = int(made.memory.buf) + GUARD
    region = wire.RegionDescriptor(made.address, 5, LENGTH, ((base, made.memory.rkey),))
    return {
        "number": len(stations) - 1,
        "address": wire.sealed(b"tea\x01" + made.address.pack()).hex(),
        "region": region.pack().hex(),
        "counter": wire.CounterDescriptor(made.address, 6).pack().hex(),
        "length": LENGTH,
        "guard": GUARD,
        "granted_id": made.granted_id,
    }


def aim(number: int, address: str) -> None:
    """Towards the engine with this address."""
    one = stations[number]
    one.target = wire.Address.take(wire.opened(bytes.fromhex(address), b"a"))
    one.remote = wire.Nic.unpack(one.target.nics[0])


def begin(number: int) -> dict[str, Any]:
    """A new attempt, to the end of the handshake: its number and theirs."""
    one = stations[number]
    pairs = one.make()
    one.offer()
    until(lambda: pairs.up, "the handshake")
    return {"attempt": pairs.attempt, "theirs": pairs.theirs}


def say_and_listen(number: int, changes: list[dict[str, Any]], answers: int, damage: bool = False) -> list[Any]:
    """Offers with these changes, one after the other; what is heard until there are so many answers or more."""
    one = stations[number]
    assert one.remote is not None
    before = len(one.heard)
    if one.pairs is None:
        one.pairs = Pairs(one, 1)
    one.repeat_at = time.monotonic() + DEADLINE_S
    for change in changes:
        data = bytearray(one.offer_now(**change).pack())
        if damage:
            data[90] ^= 1
        one.datagram(one.remote, bytes(data))
    until(lambda: len(one.heard) >= before + answers, f"{answers} answers")
    return [plain(message) for message in one.heard[before:]]


def hello(number: int) -> dict[str, Any]:
    one = stations[number]
    session = one.new_session()
    one.say_hello(wire.HELLO)
    until(lambda: session.acknowledged, "the answer to the hello")
    assert session.theirs is not None
    return plain(session.theirs)


def attach(number: int, descriptor: str, *, region: bool) -> dict[str, Any]:
    one = stations[number]
    data = bytes.fromhex(descriptor)
    parsed = wire.RegionDescriptor.unpack(data) if region else wire.CounterDescriptor.unpack(data)
    one.records("BQ", wire.ATTACH_REGION if region else wire.ATTACH_COUNTER, parsed.serial)
    answer = wire.REGION_ATTACHED if region else wire.COUNTER_ATTACHED

    def answered() -> Any:
        records = session_of(one).records
        return next((r for r in records if r["type"] == answer and r["serial"] == parsed.serial), None)

    return dict(until(answered, "the attachment"))


def write(number: int, seed: int, pieces: list[tuple[int, int]], base: int, key: int, immediate: int | None) -> None:
    """Pieces (offset, length) of random bytes, to the same offsets behind `base`; the immediate goes with the last."""
    one = stations[number]
    assert one.pairs is not None
    one.source.write(random.Random(seed).randbytes(LENGTH), LENGTH)
    done = one.sends_done
    for index, (at, length) in enumerate(pieces):
        last = immediate is not None and index == len(pieces) - 1
        request = SendWR(
            wr_id=SENT, opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM if last else e.IBV_WR_RDMA_WRITE, num_sge=1,
            sg=[SGE(int(one.source.buf) + at, length, one.source.lkey)], imm_data=socket.htonl(immediate or 0),
        )  # fmt: skip
        request.set_wr_rdma(key, base + at)
        one.pairs.qps[WRITES].post_send(request)
    until(lambda: one.failures or one.sends_done >= done + len(pieces), "the completions of writes")
    assert not one.failures, one.failures


def ping(number: int) -> list[int]:
    """The counts in the answer."""
    session = session_of(stations[number])
    before = len(session.pongs)
    stations[number].say(wire.PING, stations[number].counts())
    return list(until(lambda: session.pongs[before:], "a pong")[0])


def received(number: int, immediates: int, seed: int) -> dict[str, Any]:
    """Once so many immediates are there: they, and whether the memory is as written with these random bytes."""
    one = stations[number]
    until(lambda: len(one.immediates) >= immediates, "the immediates")
    wanted = random.Random(seed).randbytes(LENGTH)
    content = bytes(one.memory.read(LENGTH + 2 * GUARD, 0))
    return {
        "immediates": one.immediates,
        "equal": content[GUARD:-GUARD] == wanted,
        "guards": content[:GUARD] == content[-GUARD:] == POISON * GUARD,
    }


def records(number: int, kind: int) -> list[Any]:
    """Of this type, once one is there."""
    return list(until(lambda: [r for r in session_of(stations[number]).records if r["type"] == kind], f"record {kind}"))


def heard(number: int, kind: int) -> list[Any]:
    """Messages of the handshake of this kind, once one is there."""
    return [plain(m) for m in until(lambda: [m for m in stations[number].heard if m.kind == kind], f"kind {kind}")]


def main() -> None:
    actions = {a.__name__: a for a in (station, aim, begin, say_and_listen, hello, attach, write, ping, received,
                                       records, heard)}  # fmt: skip
    while True:
        if not select.select([sys.stdin], [], [], 0.001)[0]:
            serve()
            continue
        line = sys.stdin.readline()
        if not line:
            return
        name, arguments = json.loads(line)
        try:
            answer = {"result": actions[name](**arguments)}
        except Exception:  # noqa: BLE001
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
