"""The TCP store: what clients may do, and what strangers cannot."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import SOON_S, in_threads

import transfer_engine as te
from transfer_engine.rendezvous import StoreServer, TcpStore, wire
from transfer_engine.rendezvous.environment import Meeting
from transfer_engine.rendezvous.wire import Presence

Connect = Callable[..., TcpStore]


@pytest.fixture(params=[b"", b"a secret"], ids=["open", "token"])
def token(request: pytest.FixtureRequest) -> bytes:
    value: bytes = request.param
    return value


@pytest.fixture(params=["127.0.0.1", "::1"], ids=["ipv4", "ipv6"])
def server(request: pytest.FixtureRequest, token: bytes) -> Iterator[StoreServer]:
    try:
        started = StoreServer(request.param, token=token, most_bytes=1 << 20)
    except te.ConfigError as cause:
        pytest.skip(f"no {request.param} here: {cause.message}")
    with started:
        yield started


@pytest.fixture
def connect(server: StoreServer, token: bytes) -> Iterator[Connect]:
    stores: list[TcpStore] = []

    def make(rank: int = 0, world_size: int = 8, secret: bytes = token, timeout_s: float = SOON_S) -> TcpStore:
        place = Meeting(server.host, (server.port,))
        stores.append(TcpStore(place, rank=rank, world_size=world_size, token=secret, timeout_s=timeout_s))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_values_are_set_read_counted_and_removed(connect: Connect) -> None:
    store, other = connect(0), connect(1)
    store.set("a", b"\x00\xff")
    other.set("b", "text")
    assert other.multi_get(["a", "b"]) == [b"\x00\xff", b"text"]
    assert (store.add("n", 5), other.add("n", -7)) == (5, -2)
    assert store.get("n") == b"-2"
    assert store.check(["a", "b"])
    assert store.present(["a", "x"]) == [True, False]
    assert (other.delete_key("a"), other.delete_key("a")) == (True, False)
    assert not store.check(["a"])


def test_waiting_ends_when_the_last_key_comes(connect: Connect) -> None:
    store, other = connect(0), connect(1)
    other.set("one", b"1")
    answers = in_threads(2, lambda which: store.multi_get(["one", "two"]) if which else other.set("two", b"2"))
    assert answers[1] == [b"1", b"2"]


def test_waiting_is_over_in_time(connect: Connect) -> None:
    store = connect()
    with pytest.raises(te.TransferTimeout):
        store.get("never", 0.05)
    with pytest.raises(te.TransferTimeout):
        store.wait(["never"], timedelta(milliseconds=20))
    with pytest.raises(te.TransferTimeout):
        store.wait(["never"], 0)
    store.set("still works", b"")
    assert store.get("still works") == b""


def test_a_client_that_waits_keeps_nobody_up(connect: Connect) -> None:
    waiting = [connect(rank) for rank in range(1, 5)]
    free = connect(0)

    def work(rank: int) -> object:
        if rank:
            return waiting[rank - 1].get("go")
        for index in range(50):
            free.set(f"k{index}", b"v")
        free.set("go", b"now")
        return None

    assert in_threads(5, work)[1:] == [b"now"] * 4


def test_many_values_come_in_several_answers(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_engine.rendezvous.board.REPLY_BYTES", 1000)
    store = connect()
    for index in range(20):
        store.set(f"k{index}", bytes([index]) * 300)
    assert store.multi_get([f"k{index}" for index in range(20)]) == [bytes([index]) * 300 for index in range(20)]


def test_the_store_has_a_limit(connect: Connect) -> None:
    store = connect()
    store.set("big", bytes(900_000))
    with pytest.raises(te.ResourceExhausted, match="store is full"):
        store.set("more", bytes(900_000))
    store.set("big", bytes(1000))
    store.set("more", bytes(900_000))


def test_wrong_arguments_are_refused_here(connect: Connect) -> None:
    store = connect()
    store.set("text", b"abc")
    for call in (
        lambda: store.add("text", 1),
        lambda: store.set("", b""),
        lambda: store.set("k" * 2000, b""),
        lambda: store.set("k", bytes(wire.MOST_VALUE_BYTES + 1)),
    ):
        with pytest.raises(te.ArgumentError):
            call()
    store.add("large", (1 << 63) - 1)
    with pytest.raises(te.ArgumentError, match="64 bits"):
        store.add("large", 1)
    assert store.get("text") == b"abc"


def test_each_rank_is_there_once_and_may_come_again(connect: Connect) -> None:
    first = connect(3)
    with pytest.raises(te.ConfigError, match="rank 3 is connected already"):
        connect(3)
    first.close()
    again = connect(3)
    assert again.ranks()[3][0] is Presence.CONNECTED


def test_who_left_and_who_was_lost_is_known(connect: Connect) -> None:
    store, leaving, dying = connect(0), connect(1), connect(2)
    leaving.close()
    dying._socket.close()
    deadline = threading.Event()
    for _ in range(2000):
        known = {rank: presence for rank, (presence, _) in store.ranks().items()}
        if known[2] is Presence.LOST:
            break
        deadline.wait(0.005)
    assert known == {0: Presence.CONNECTED, 1: Presence.LEFT, 2: Presence.LOST}


def test_another_world_size_is_refused() -> None:
    with (
        StoreServer("127.0.0.1", world_size=4, token=b"") as server,
        pytest.raises(te.ConfigError, match="has 4 ranks, not 5"),
    ):
        TcpStore(Meeting(server.host, (server.port,)), world_size=5, token=b"", timeout_s=SOON_S)


@pytest.mark.parametrize(
    ("theirs", "mine", "reason"),
    [
        (b"one", b"", "the store has a cluster token, the client has none"),
        (b"", b"one", "the client has a cluster token, the store has none"),
        (b"one", b"two", "cluster token is another one"),
    ],
)
def test_another_token_is_refused_on_either_side(theirs: bytes, mine: bytes, reason: str) -> None:
    with StoreServer("127.0.0.1", token=theirs) as server, pytest.raises(te.ConfigError, match=reason):
        TcpStore(Meeting(server.host, (server.port,)), token=mine, timeout_s=SOON_S)


def test_a_store_of_another_job_is_passed_over() -> None:
    with StoreServer("127.0.0.1", job="a", token=b"") as other, StoreServer("127.0.0.1", job="b", token=b"") as server:
        store = TcpStore(Meeting("127.0.0.1", (other.port, server.port)), job="b", token=b"", timeout_s=SOON_S)
        assert store.address == server.address
        store.close()


def test_nobody_there_is_said_in_time_with_the_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(te.PeerUnreachable, match="refused") as caught:
            TcpStore(Meeting("127.0.0.1", (port,)), token=b"", timeout_s=0.2)
    assert caught.value.peer == f"127.0.0.1:{port}"
    assert caught.value.elapsed_s is not None
    assert caught.value.elapsed_s < SOON_S


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack(">I", 5) + b"\xffabcd"])
def test_a_port_of_somebody_else_is_no_store(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON_S)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(SOON_S)
                    connection.recv(100)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        place = Meeting("127.0.0.1", (listener.getsockname()[1],))
        with pytest.raises(te.PeerUnreachable, match="no rendezvous store answers"):
            TcpStore(place, token=b"", timeout_s=0.2)
        stop.set()
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", place.ports[0]), timeout=SOON_S) as last,
        ):
            last.sendall(b"end")
        thread.join(SOON_S)
        assert not thread.is_alive()


def test_a_dead_server_is_named_and_stays_dead(server: StoreServer, connect: Connect) -> None:
    store = connect()
    server.close()
    for _ in range(2):
        with pytest.raises(te.PeerUnreachable, match="rank 0's process may have ended") as caught:
            store.set("k", b"v")
        assert caught.value.peer == server.address


def test_a_server_closed_while_clients_wait_lets_them_go(server: StoreServer, connect: Connect) -> None:
    store = connect()
    with pytest.raises(te.PeerUnreachable):
        in_threads(2, lambda which: store.get("never") if which == 0 else server.close())


def test_closing_is_idempotent_and_a_closed_store_says_so(server: StoreServer, connect: Connect) -> None:
    store = connect()
    store.close()
    store.close()
    with pytest.raises(te.PeerUnreachable, match="was closed"):
        store.get("k")
    server.close()
    server.close()


def test_a_port_in_use_is_named(server: StoreServer) -> None:
    with pytest.raises(te.ConfigError, match="in use") as caught:
        StoreServer(server.host, server.port)
    assert caught.value.status == "EADDRINUSE"


def raw(server: StoreServer) -> socket.socket:
    connection = socket.create_connection((server.host, server.port), timeout=SOON_S)
    connection.settimeout(SOON_S)
    return connection


def test_a_length_beyond_the_limit_ends_the_connection_at_once(server: StoreServer, connect: Connect) -> None:
    with raw(server) as stranger:
        stranger.sendall(struct.pack(">I", 1 << 30))
        assert stranger.recv(1) == b""
    connect().set("k", b"v")


def test_a_second_request_before_the_answer_ends_the_connection() -> None:
    with StoreServer("127.0.0.1", token=b"") as server, raw(server) as client:
        client.sendall(wire.frame(wire.Hello("", 0, 1, bytes(32), False).encode()))
        client.recv(1000)
        client.sendall(wire.frame(wire.EMPTY_PROOF))
        client.recv(1000)
        client.sendall(wire.frame(wire.encode_ask(wire.Ask(wire.Request.GET, ("never",), timeout_s=60))) + b"more")
        assert client.recv(1) == b""


def test_who_does_not_prove_the_token_gets_nothing() -> None:
    with StoreServer("127.0.0.1", token=b"secret") as server, raw(server) as client:
        client.sendall(wire.frame(wire.Hello("", 0, 1, bytes(32), True).encode()))
        client.recv(1000)
        client.sendall(wire.frame(bytes(32)) + wire.frame(wire.encode_ask(wire.Ask(wire.Request.SET, ("k",), b"v"))))
        answer = client.recv(1000)
        assert wire.decode_answer(answer[4:]).refusal is wire.Refusal.TOKEN
        assert client.recv(1) == b""
        store = TcpStore(Meeting(server.host, (server.port,)), token=b"secret", timeout_s=SOON_S)
        assert not store.check(["k"])
        store.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.booleans())
def test_noise_harms_nobody(noisy_server: tuple[StoreServer, TcpStore], chunks: list[bytes], framed: bool) -> None:
    server, honest = noisy_server
    with raw(server) as stranger, contextlib.suppress(OSError):
        for chunk in chunks:
            stranger.sendall(wire.frame(chunk) if framed and chunk else chunk)
    honest.set("k", chunks[0])
    assert honest.get("k") == chunks[0]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=300))
def test_noise_after_the_handshake_harms_nobody(noisy_server: tuple[StoreServer, TcpStore], body: bytes) -> None:
    server, honest = noisy_server
    with raw(server) as stranger, contextlib.suppress(OSError):
        hello = wire.Hello("noise", 0, 1, bytes(32), False)
        stranger.sendall(wire.frame(hello.encode()) + wire.frame(wire.EMPTY_PROOF) + wire.frame(body))
    honest.set("k", body)
    assert honest.get("k") == body


@pytest.fixture(scope="module")
def noisy_server() -> Iterator[tuple[StoreServer, TcpStore]]:
    with StoreServer("127.0.0.1", token=b"") as server:
        honest = TcpStore(Meeting(server.host, (server.port,)), token=b"", timeout_s=SOON_S)
        yield server, honest
        honest.close()
