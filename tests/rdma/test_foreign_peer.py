"""An engine and a peer that shares no code with it, as docs/handshake.md has it: they connect and write, both ways."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .conftest import Player

PROGRAM = Path(__file__).with_name("foreign.py")
SOON_S = 60.0
OFFER, BYE, REFUSE = 1, 2, 3
STALE, UNKNOWN, VERSION = 1, 2, 4
GUARD, POISON = 4096, 0xA5
LENGTH = 1 << 16


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError("not in time")


@pytest.fixture(scope="module")
def program() -> Iterator[Player]:
    command = ["/usr/bin/python3", "-Es", str(PROGRAM)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Player(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def engine(program) -> Iterator[te.Engine]:
    """It closes first: only those who are still there can confirm that they have drained."""
    settings = te.Settings(
        nics=("rxe0",), core="none", max_peers=16, immediate_window=64, nic_depth=128, operations=1024,
        max_regions=4096, timeout_s=SOON_S, peer_timeout_s=SOON_S,
    )  # fmt: skip
    with te.Engine("cx7", settings=settings) as opened:
        yield opened


class Foreign:
    """A NIC on rxe1 that the program plays, with an address of its own."""

    def __init__(self, program: Player, version: int = 1) -> None:
        self._program = program
        made = program("station", device="rxe1", version=version)
        self._number = made["number"]
        self.granted_id = made["granted_id"]
        self.address = te.Address.from_bytes(bytes.fromhex(made["address"]))
        self.region = te.RegionDescriptor.from_bytes(bytes.fromhex(made["region"]))
        self.counter = te.CounterDescriptor.from_bytes(bytes.fromhex(made["counter"]))
        assert (made["length"], made["guard"]) == (LENGTH, GUARD)

    def __call__(self, name: str, **arguments: Any) -> Any:
        return self._program(name, number=self._number, **arguments)

    def offers(self, *changes: dict[str, Any], answers: int, damage: bool = False) -> list[SimpleNamespace]:
        heard = self("say_and_listen", changes=list(changes), answers=answers, damage=damage)
        return [SimpleNamespace(**message) for message in heard]

    def state(self, engine: te.Engine) -> str | None:
        peer = engine.stats()["peers"].get(str(self.address))
        return peer and peer["state"]


@pytest.fixture
def foreign(program) -> Callable[..., Foreign]:
    return lambda **arguments: Foreign(program, **arguments)


class Target:
    """Poisoned memory of the engine with guards, and its counters."""

    def __init__(self, engine: te.Engine) -> None:
        self.memory = np.full(LENGTH + 2 * GUARD, POISON, np.uint8)
        self.region = engine.register(self.memory[GUARD:-GUARD])
        self.counters = [engine.counter() for _ in range(2)]

    def attach(self, peer: Foreign) -> SimpleNamespace:
        """Base and key; the id of the second counter: that of the first may be zero."""
        region = peer("attach", descriptor=bytes(self.region.descriptor).hex(), region=True)
        counters = [peer("attach", descriptor=bytes(c.descriptor).hex(), region=False) for c in self.counters]
        assert [granted["granted"] for granted in (region, *counters)] == [1, 1, 1]
        assert region["length"] == LENGTH
        assert counters[0]["id"] != counters[1]["id"]
        ((base, key),) = region["keys"]
        return SimpleNamespace(base=base, key=key, id=counters[1]["id"])

    def check(self, seed: int, ranges: list[tuple[int, int]]) -> None:
        """These ranges are as written, all else is untouched."""
        data = random.Random(seed).randbytes(LENGTH)
        wanted = bytearray([POISON]) * len(self.memory)
        for at, length in ranges:
            wanted[GUARD + at : GUARD + at + length] = data[at : at + length]
        assert self.memory.tobytes() == wanted


def opened(peer: Foreign, engine: te.Engine) -> dict[str, Any]:
    """The handshake and the hello, begun by the foreign peer."""
    peer("aim", address=bytes(engine.address).hex())
    return {**peer("begin"), **peer("hello")}


def test_a_foreign_peer_opens_and_its_writes_land_and_count_exactly(engine, foreign) -> None:
    peer, target = foreign(), Target(engine)
    hello = opened(peer, engine)
    assert bytes.fromhex(hello["sender"]["identity"]) == engine.address.identity
    assert hello["immediate_window"] == 64
    assert peer.state(engine) == "connected"
    granted = target.attach(peer)
    pieces = [(64, 4097), (8192, 1), (8193, 30000)]
    where = {"base": granted.base, "key": granted.key}
    peer("write", seed=1, pieces=pieces, immediate=granted.id << 16, **where)
    assert target.counters[1].wait(1, timeout_s=SOON_S) == 1
    target.check(1, pieces)
    # The payload of a plain id is how many more than one.
    peer("write", seed=1, pieces=[(50000, 3)], immediate=granted.id << 16 | 2, **where)
    assert target.counters[1].wait(4, timeout_s=SOON_S) == 4
    peer("write", seed=1, pieces=[(60000, 100)], immediate=None, **where)
    assert peer("ping") == [2]  # behind the writes, but on another queue pair
    eventually(lambda: target.memory[GUARD + 60099] == random.Random(1).randbytes(LENGTH)[60099])
    target.check(1, [*pieces, (50000, 3), (60000, 100)])
    assert [counter.value for counter in target.counters] == [0, 4]
    assert engine.stats()["engine"]["stray_immediates"] == 0


def test_an_engine_opens_towards_a_foreign_peer_and_writes_into_its_memory(engine, foreign) -> None:
    peer = foreign()
    data = np.frombuffer(random.Random(2).randbytes(LENGTH), np.uint8)
    with engine.register(data) as region:
        first = engine.write(region[:40000], peer.region[:40000], notify=peer.counter)
        second = engine.write(region[40000:], peer.region[40000:], notify=peer.counter, flush=True)
        first.wait(SOON_S)
        second.wait(SOON_S)
    assert peer("received", immediates=2, seed=2) == {
        "immediates": [peer.granted_id << 16] * 2, "equal": True, "guards": True,
    }  # fmt: skip
    assert peer.state(engine) == "connected"


def test_a_peer_that_was_written_to_writes_back_in_the_same_session(engine, foreign) -> None:
    peer, target = foreign(), Target(engine)
    engine.connect(peer.address).wait(SOON_S)
    granted = target.attach(peer)
    peer("write", seed=3, pieces=[(0, LENGTH)], base=granted.base, key=granted.key, immediate=granted.id << 16)
    assert target.counters[1].wait(1, timeout_s=SOON_S) == 1
    target.check(3, [(0, LENGTH)])


def test_an_offer_is_answered_as_often_as_it_comes_until_it_says_ready(engine, foreign) -> None:
    peer = foreign()
    attempts = opened(peer, engine)
    ready, doubled = {"ready": 1}, {"ready": 0}
    (answer,) = peer.offers(ready, ready, doubled, answers=1)
    assert (answer.kind, answer.attempt, answer.echo) == (OFFER, attempts["theirs"], attempts["attempt"])
    assert answer.ready == 1
    assert len(peer.offers(doubled, doubled, answers=2)) == 2
    assert peer("ping") == [0]


def test_an_older_attempt_is_ignored(engine, foreign) -> None:
    peer = foreign()
    peer("aim", address=bytes(engine.address).hex())
    peer("begin")
    again = {**peer("begin"), **peer("hello")}
    late = {"attempt": again["attempt"] - 1, "echo": 0, "ready": 0}
    (answer,) = peer.offers(late, {"ready": 0}, answers=1)
    assert answer.echo == again["attempt"]
    assert peer("ping") == [0]
    assert peer.state(engine) == "connected"


def test_a_newer_attempt_replaces_the_connection_and_counting_goes_on_exactly(engine, foreign) -> None:
    peer, target = foreign(), Target(engine)
    lost: list[str] = []
    stop = engine.on_peer_lost(lambda gone: lost.append(str(gone.address)))
    before = opened(peer, engine)
    granted = target.attach(peer)
    peer("write", seed=4, pieces=[(0, 5000)], base=granted.base, key=granted.key, immediate=granted.id << 16)
    assert target.counters[1].wait(1, timeout_s=SOON_S) == 1
    after = peer("begin")
    assert after["theirs"] > before["theirs"]
    assert eventually(lambda: lost) == [str(peer.address)]
    assert peer.state(engine) == "lost"
    peer("hello")
    assert peer.state(engine) == "connected"
    (question,) = peer("records", kind=11)  # whether all from before has ended: answered, so that ids are free again
    assert question["serial"] == 0
    granted = target.attach(peer)
    peer("write", seed=4, pieces=[(5000, 5000)], base=granted.base, key=granted.key, immediate=granted.id << 16)
    assert target.counters[1].wait(2, timeout_s=SOON_S) == 2
    target.check(4, [(0, 10000)])
    stop()


def test_an_offer_of_another_version_is_refused_by_its_attempt(engine, foreign) -> None:
    peer = foreign()
    peer("aim", address=bytes(engine.address).hex())
    # A refusal of that version is not refused in its turn: else the next answer would not be the last.
    (answer, last) = peer.offers(
        {"version": 2, "attempt": 9}, {"version": 2, "kind": REFUSE, "refusal": VERSION}, {"version": 2}, answers=2
    )
    assert (answer.kind, answer.refusal, answer.version, answer.echo) == (REFUSE, VERSION, 1, 9)
    assert (last.kind, last.refusal, last.echo) == (REFUSE, VERSION, 1)
    assert peer.state(engine) is None


def test_an_engine_that_is_refused_for_its_version_says_so(engine, foreign) -> None:
    peer = foreign(version=2)
    with pytest.raises(te.PeerUnreachable, match="another version of the connection handshake"):
        engine.connect(peer.address).wait(SOON_S)


def test_offers_to_somebody_else_or_with_a_dead_echo_are_refused_and_damaged_ones_dropped(engine, foreign) -> None:
    peer = foreign()
    peer("aim", address=bytes(engine.address).hex())
    other = 0x0123456789ABCDEF
    (answer,) = peer.offers({"target_cookie": other}, answers=1)
    assert (answer.kind, answer.refusal, answer.echo, answer.sender["cookie"]) == (REFUSE, STALE, 1, other)
    (answer,) = peer.offers({"target_generation": engine.address.generation + 1}, answers=1)
    assert (answer.kind, answer.refusal) == (REFUSE, STALE)
    (answer,) = peer.offers({"echo": 1 << 60}, answers=1)
    assert (answer.kind, answer.refusal, answer.echo) == (REFUSE, UNKNOWN, 1)
    peer.offers({}, {}, answers=0, damage=True)
    (answer,) = peer.offers({"echo": 1 << 60}, answers=1)
    assert (answer.kind, answer.refusal) == (REFUSE, UNKNOWN)


def test_a_goodbye_ends_the_connection_at_once(engine, foreign) -> None:
    peer = foreign()
    opened(peer, engine)
    peer.offers({"kind": BYE}, answers=0)
    eventually(lambda: peer.state(engine) == "lost")


def test_an_engine_that_disconnects_says_goodbye_in_both_ways(engine, foreign) -> None:
    peer = foreign()
    opened(peer, engine)
    engine.disconnect(peer.address).wait(SOON_S)
    (goodbye,) = peer("records", kind=13)
    assert goodbye["for_good"] == 0
    (closed, *_) = peer("heard", kind=BYE)
    assert closed["attempt"] > 0
