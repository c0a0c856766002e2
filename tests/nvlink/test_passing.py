"""Descriptors passed between processes: to whom, and to whom not; and the cards that say where."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transfer_engine as te
from transfer_engine.nvlink.card import Card, Host, here, ways
from transfer_engine.nvlink.passing import Counter, PassingError, Ticket, fetch

SOON_S = 20.0


@pytest.fixture
def counter() -> Iterator[Counter]:
    descriptor = os.memfd_create("te-nvlink-test")
    os.write(descriptor, b"content")
    counter = Counter(descriptor)
    yield counter
    counter.close()


def soon() -> float:
    return time.monotonic() + SOON_S


def fetched(ticket: Ticket) -> bytes:
    descriptor = fetch(ticket, soon())
    try:
        assert not os.get_inheritable(descriptor)
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def test_whoever_has_the_ticket_gets_the_descriptor_as_often_as_wanted(counter: Counter) -> None:
    assert [fetched(counter.ticket) for _ in range(3)] == [b"content"] * 3


def test_a_wrong_token_is_refused_and_others_are_served(counter: Counter) -> None:
    for wrong in (b"", b"?" * 32, counter.ticket.question[:-1], counter.ticket.question + b"?", counter.ticket.answer):
        with pytest.raises(PassingError, match=r"hung up|token"):
            fetch(dataclasses.replace(counter.ticket, question=wrong), soon())
    assert fetched(counter.ticket) == b"content"


def test_a_socket_that_does_not_prove_itself_is_refused_and_its_descriptor_closed(counter: Counter) -> None:
    assert fetched(counter.ticket)  # its thread runs
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(PassingError, match="somebody else"):
        fetch(dataclasses.replace(counter.ticket, answer=b"?" * 32), soon())
    deadline = soon()
    while len(os.listdir("/proc/self/fd")) > before:  # noqa: PTH208 - the server, too, closes its end
        assert time.monotonic() < deadline


def test_clients_that_say_nothing_keep_nobody_waiting(counter: Counter) -> None:
    silent = []
    for _ in range(20):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(counter.ticket.name)
        silent.append(client)
    assert fetched(counter.ticket) == b"content"
    for client in silent:
        client.close()
    assert fetched(counter.ticket) == b"content"


def test_a_counter_that_was_closed_is_gone(counter: Counter) -> None:
    counter.close()
    counter.close()
    with pytest.raises(PassingError) as caught:
        fetch(counter.ticket, soon())
    assert caught.value.gone


def test_a_server_that_never_answers_is_given_up_at_the_deadline() -> None:
    ticket = Ticket.fresh()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(ticket.name)
        listener.listen()
        with pytest.raises(PassingError, match="in time"):
            fetch(ticket, time.monotonic() + 0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody else")
def test_another_user_is_refused_even_with_the_ticket(counter: Counter) -> None:
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setuid(65534)
            fetch(counter.ticket, soon())
        except PassingError as error:
            status = 42 if "another user" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:  # the server's own look at the user
        child = os.fork()
        if not child:
            status = 1
            try:
                os.setuid(65534)
                client.connect(counter.ticket.name)
                client.send(counter.ticket.question)
                status = 42 if client.recv(100).startswith(b"refused: the user") else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


# --- cards ------------------------------------------------------------------------------------------------------------

hosts = st.builds(Host, st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
tickets = st.none() | st.builds(Ticket, st.binary(max_size=40), st.binary(max_size=32), st.binary(max_size=32))
lengths = st.tuples(st.integers(1, 1 << 61), st.integers(1, 1 << 61)).map(sorted)


@given(hosts, lengths, st.text(), tickets, st.binary(max_size=64))
def test_cards_round_trip(host: Host, length: list[int], device: str, ticket: Ticket | None, fabric: bytes) -> None:
    card = Card(host, length[0], length[1], device, ticket, fabric)
    assert Card.from_bytes(bytes(card)) == card


@given(hosts, st.text(min_size=1))
def test_cards_without_an_offer_round_trip(host: Host, problem: str) -> None:
    assert Card.from_bytes(bytes(Card(host, problem=problem))) == Card(host, problem=problem)


@given(st.binary())
def test_bytes_that_are_no_card_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Card.from_bytes(data)


@pytest.mark.parametrize(
    "change", [{"nbytes": 0}, {"length": 1}, {"nbytes": "5"}, {"version": 2}, {"host": 3}, {"more": 1}]
)
def test_cards_with_impossible_contents_are_refused(change: dict[str, object]) -> None:
    import json

    fields = json.loads(bytes(Card(here(), 5, 8, "device")))
    with pytest.raises(ValueError):
        Card.from_bytes(json.dumps({**fields, **change}).encode())


def card(boot: str, network: str = "net", fabric: bytes = b"") -> Card:
    return Card(Host(f"host of {boot}", boot, network), 1, 1, "device", None, fabric)


def test_ranks_of_one_host_pass_descriptors_also_where_they_have_fabric_handles() -> None:
    assert ways([card("a"), card("a"), card("a")], 1) == {0: "descriptor", 1: "own", 2: "descriptor"}
    assert ways([card("a", fabric=b"1"), card("a", fabric=b"2")], 0) == {0: "own", 1: "descriptor"}


def test_other_hosts_need_fabric_handles_on_both_sides() -> None:
    assert ways([card("a", fabric=b"1"), card("b", fabric=b"2")], 0) == {0: "own", 1: "fabric"}
    for cards in ([card("a"), card("b", fabric=b"2")], [card("a", fabric=b"1"), card("b")]):
        with pytest.raises(te.ConfigError, match=r"rank 1 \(host of b\) is on other hosts"):
            ways(cards, 0)


def test_other_network_namespaces_of_one_host_are_told_apart() -> None:
    assert ways([card("a", "x", b"1"), card("a", "y", b"2")], 0) == {0: "own", 1: "fabric"}
    with pytest.raises(te.ConfigError, match="network namespace"):
        ways([card("a", "x"), card("a", "y")], 0)


def test_many_ranks_that_cannot_be_reached_are_named_up_to_a_limit() -> None:
    with pytest.raises(te.ConfigError, match=r"ranks 1 .* and 24 more are on other hosts"):
        ways([card("a"), *[card("b") for _ in range(40)]], 0)
