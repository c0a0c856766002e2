"""What the launcher's variables mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transfer_engine as te
from transfer_engine.rendezvous import environment


def test_rank_and_world_come_from_arguments_before_the_environment() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "8"}
    assert environment.ranks(None, None, variables) == (3, 8)
    assert environment.ranks(1, None, variables) == (1, 8)
    assert environment.ranks(0, 2, {}) == (0, 2)


@pytest.mark.parametrize(
    ("rank", "world", "variables", "named"),
    [
        (None, None, {}, "RANK"),
        (0, None, {}, "WORLD_SIZE"),
        (None, None, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK: 'x'"),
        (2, 2, {}, "rank 2 of 2"),
        (-1, 2, {}, "rank -1 of 2"),
        (0, 0, {}, "rank 0 of 0"),
    ],
)
def test_what_is_missing_or_impossible_is_named(
    rank: int | None, world: int | None, variables: dict[str, str], named: str
) -> None:
    with pytest.raises(te.ConfigError, match=named):
        environment.ranks(rank, world, variables)


def test_ports_behind_torchruns_own_are_used() -> None:
    found = environment.meeting(4, {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert found == environment.Meeting("node1", tuple(range(29501, 29509)))


def test_where_the_numbers_end_the_ports_before_are_used() -> None:
    ports = environment.meeting(4, {"MASTER_ADDR": "node1", "MASTER_PORT": "65530"}).ports
    assert ports == tuple(range(65529, 65521, -1))


def test_our_own_variable_wins_and_means_exactly_that() -> None:
    variables = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TE_RENDEZVOUS": "[fd00::1]:7000"}
    assert environment.meeting(4, variables) == environment.Meeting("fd00::1", (7000,))


def test_one_process_needs_no_address() -> None:
    assert environment.meeting(1, {}).ports == (0,)
    with pytest.raises(te.ConfigError, match="MASTER_ADDR"):
        environment.meeting(2, {})


def test_jobs_have_different_names() -> None:
    base = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a"}
    others = [{**base, "MASTER_PORT": "29501"}, {**base, "TORCHELASTIC_RUN_ID": "b"}]
    others.append({**base, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert len({environment.job_name(one) for one in (base, *others)}) == 4


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "::1:80", "[]:1", "a:-1"]
)
def test_addresses_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(te.ConfigError, match="HOST:PORT"):
        environment.parse_address(text, "store")


@given(st.one_of(st.ip_addresses().map(str), st.sampled_from(("node-1", "a.b.example"))), st.integers(1, 65535))
def test_addresses_round_trip(host: str, port: int) -> None:
    assert environment.parse_address(environment.address_text(host, port), "store") == (host, port)


@pytest.mark.parametrize(
    ("host", "literal"),
    [("localhost", True), ("10.0.0.1", True), ("::1", True), ("fe80::1%eth0", True), ("node1", False)],
)
def test_names_are_told_from_addresses(host: str, literal: bool) -> None:
    assert environment.is_literal(host) is literal
