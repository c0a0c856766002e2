from __future__ import annotations

import threading
from typing import Any

import pytest

import transfer_engine as te

SOON_S = 20.0


def test_connecting_ahead_is_idempotent(pair: Any) -> None:
    peer = pair.a.connect(pair.b.address)
    again = pair.a.connect(bytes(pair.b.address))
    peer.wait(SOON_S)
    again.wait(SOON_S)
    assert peer == again
    assert hash(peer) == hash(again)
    assert peer.state == "connected"
    assert peer.address == pair.b.address
    assert peer.nics == pair.b.address.nics


async def test_connecting_can_be_awaited(pair: Any) -> None:
    await pair.a.connect(pair.b.address)
    assert pair.a.connect(pair.b.address).state == "connected"


def test_an_engine_that_is_gone_is_unreachable(make_engine: Any) -> None:
    engine, gone = make_engine(connect_timeout_s=0.2), make_engine()
    gone.close()
    with pytest.raises(te.PeerUnreachable) as caught:
        engine.connect(gone.address).wait(SOON_S)
    assert caught.value.peer == str(gone.address)


def test_a_deadline_may_pass_while_connecting(make_engine: Any) -> None:
    engine, gone = make_engine(), make_engine()
    gone.close()
    with pytest.raises(te.TransferTimeout):
        engine.connect(gone.address, timeout_s=0.1).wait(SOON_S)


@pytest.mark.parametrize("wrong", [5, None, object()])
def test_what_is_no_address_raises_a_type_error(engine: te.Engine, wrong: Any) -> None:
    for call in (engine.connect, engine.disconnect, engine.fence):
        with pytest.raises(TypeError):
            call(wrong)


@pytest.mark.parametrize("wrong", [None, 3, "callback"])
def test_a_callback_that_cannot_be_called_is_refused_at_once(pair: Any, wrong: Any) -> None:
    transfer = pair.a.write(pair.region[:8], pair.remote[:8])
    for register in (
        pair.a.on_peer_lost,
        transfer.add_done_callback,
        pair.counter.reached(0).add_done_callback,
        pair.a.send(pair.b.address, b"").add_done_callback,
    ):
        with pytest.raises(te.ArgumentTypeError, match="callback must be callable"):
            register(wrong)


def test_an_address_of_another_transport_is_an_argument_error(pair: Any) -> None:
    with te.Engine("shm") as other:
        address, remote = other.address, other.register(bytearray(8)).descriptor
    for call in (lambda: pair.a.connect(address), lambda: pair.a.write(pair.region[:8], remote)):
        with pytest.raises(te.ArgumentError, match="the peer speaks transport 'shm'") as caught:
            call()
        assert "one transport" in caught.value.hint


def test_the_loss_of_a_peer_is_reported_once_with_its_address(pair: Any) -> None:
    lost: list[te.Peer] = []
    reported = threading.Event()

    def on_lost(peer: te.Peer) -> None:
        lost.append(peer)
        reported.set()

    pair.a.on_peer_lost(on_lost)
    pair.a.connect(pair.b.address).wait(SOON_S)
    pair.b.close()
    assert reported.wait(SOON_S)
    assert [peer.address for peer in lost] == [pair.b.address]
    assert lost[0].state in ("lost", "closed")


def test_a_removed_callback_is_not_called(pair: Any) -> None:
    reported = threading.Event()
    remove = pair.a.on_peer_lost(lambda _: pytest.fail("was removed"))
    pair.a.on_peer_lost(lambda _: reported.set())
    remove()
    remove()
    pair.a.connect(pair.b.address).wait(SOON_S)
    pair.b.close()
    assert reported.wait(SOON_S)


def test_work_towards_a_lost_peer_fails_and_other_peers_are_not_touched(pair: Any, make_engine: Any) -> None:
    other = make_engine()
    target = bytearray(64)
    remote = other.register(target).descriptor
    pair.a.write(pair.region[:64], pair.remote[:64]).wait(SOON_S)
    pair.b.close()
    with pytest.raises(te.PeerError):
        pair.a.write(pair.region[:64], pair.remote[:64], timeout_s=SOON_S).wait(SOON_S)
    pair.a.write(pair.region[:64], remote, flush=True).wait(SOON_S)
    assert bytes(target) == bytes(pair.source[:64])


def test_a_disconnected_peer_can_be_used_again(pair: Any) -> None:
    pair.a.write(pair.region[:64], pair.remote[:64], notify=pair.notify).wait(SOON_S)
    pair.a.disconnect(pair.b.address).wait(SOON_S)
    pair.a.write(pair.region[:64], pair.remote[:64], notify=pair.notify).wait(SOON_S)
    pair.counter.wait(2, timeout_s=SOON_S)


def test_a_fence_ends_when_nothing_of_the_peer_can_land(pair: Any) -> None:
    pair.a.write(pair.region[:64], pair.remote[:64]).wait(SOON_S)
    pair.b.fence(pair.a.address).wait(SOON_S)
    pair.a.write(pair.region[64:128], pair.remote[64:128], flush=True).wait(SOON_S)
    pair.assert_only(0, pair.source[:128])


def test_a_restarted_peer_is_told_from_its_former_life(make_engine: Any) -> None:
    identity = bytes(range(1, 17))
    a = make_engine()
    first = make_engine(identity=identity)
    region = a.register(bytearray(b"x" * 8))
    old = first.register(bytearray(8)).descriptor
    a.write(region, old).wait(SOON_S)
    first.close()
    second = make_engine(identity=identity)
    memory = bytearray(8)
    new = second.register(memory).descriptor
    a.write(region, new, flush=True).wait(SOON_S)
    assert memory == b"x" * 8
    with pytest.raises(te.PeerError):
        a.write(region, old, timeout_s=SOON_S).wait(SOON_S)
