"""map_peers between real processes, with memory of the host in place of a device's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from .players import RankFailed, World

pytestmark = pytest.mark.multiprocess
Worlds = Callable[[int], World]


def failed(value: Any, kind: str, *words: str) -> bool:
    assert isinstance(value, RankFailed), value
    assert value.kind == kind, value
    assert all(word in str(value) for word in words), value
    return True


@pytest.mark.parametrize("sizes", [[1, 4097], [3, 65536, 65537], [1 << 20, 1, 131071, 2]], ids=str)
def test_every_rank_reads_and_writes_the_memory_of_every_other_one(world: Worlds, sizes: list[int]) -> None:
    ranks = world(len(sizes))
    assert list(ranks.each({rank: ("allocate", size) for rank, size in enumerate(sizes)}).values()) == sizes
    assert ranks.all("map") == [sizes] * len(sizes)
    for step in range(len(sizes)):  # to the neighbour `step` further on; to itself at first
        for rank in range(len(sizes)):
            ranks[rank].write((rank + step) % len(sizes), 1 + rank + step)
        for rank in range(len(sizes)):
            owner = (rank + step) % len(sizes)
            assert ranks[owner].check_own(1 + rank + step)
            assert all(player.check(owner, 1 + rank + step) for player in ranks.players)
    ranks.all("close_mapped")
    ranks.all("close_buffer")
    assert all(isinstance(count, int) for count in ranks.all("nothing_left"))


def test_one_rank_maps_itself(world: Worlds) -> None:
    ranks = world(1)
    ranks[0].allocate(5)
    assert ranks[0].map() == [5]
    ranks[0].write(0, 3)
    assert ranks[0].check_own(3)


def test_closing_in_any_order_leaves_nothing_and_disturbs_nobody(world: Worlds) -> None:
    ranks = world(2)
    counts = None
    for order in itertools.permutations([(rank, what) for rank in (0, 1) for what in ("close_buffer", "close_mapped")]):
        ranks.all("allocate", 4097)
        assert ranks.all("map") == [[4097, 4097]] * 2
        ranks[0].write(1, 7)
        closed: set[tuple[int, str]] = set()
        for rank, what in order:
            getattr(ranks[rank], what)()
            closed.add((rank, what))
            for other in (0, 1):
                if (other, "close_mapped") not in closed:  # it still has rank 1's memory, whoever closed what
                    own_is_closed = other == 1 and (1, "close_buffer") in closed
                    if not own_is_closed:
                        assert ranks[other].check(1, 7)
        now = ranks.all("nothing_left")
        counts = counts or now
        assert now == counts, f"descriptors leak: {counts}, then {now}"


def test_a_killed_peer_takes_no_memory_away(world: Worlds) -> None:
    ranks = world(3)
    ranks.all("allocate", 100_001)
    ranks.all("map")
    ranks[0].write(2, 9)
    ranks[2].kill()
    assert ranks[0].check(2, 9)
    ranks[1].write(2, 10)
    assert ranks[0].check(2, 10)
    for rank in (1, 0):
        ranks[rank].close_buffer()
        ranks[rank].close_mapped()
        ranks[rank].nothing_left()


def test_a_rank_that_is_killed_before_it_comes_is_named_when_the_time_is_up(world: Worlds) -> None:
    ranks = world(3)
    ranks.all("allocate", 10)
    ranks[1].kill()
    begin = time.monotonic()
    results = ranks.each({0: ("map", 2), 2: ("map", 2)})
    assert time.monotonic() - begin < 15
    assert all(failed(result, "TransferTimeout", "rank 1") for result in results.values())
    for rank in (0, 2):
        ranks[rank].close_buffer()
        ranks[rank].nothing_left()


def test_a_rank_that_is_killed_in_the_middle_is_named_and_nobody_hangs(world: Worlds) -> None:
    ranks = world(3)
    ranks.all("allocate", 10)
    ranks[1].die_once_told()
    begin = time.monotonic()
    results = ranks.each({0: ("map", 20), 1: ("map", 20), 2: ("map", 20)})
    assert time.monotonic() - begin < 15, "who sees that it is gone does not wait for it until the time is up"
    assert failed(results.pop(1), "Ended")
    assert all(failed(result, "PeerLost", "rank 1") for result in results.values())
    for rank in (0, 2):
        ranks[rank].close_buffer()
        ranks[rank].nothing_left()


def test_a_rank_with_wrong_tokens_gets_nothing_and_all_hear_of_it(world: Worlds) -> None:
    ranks = world(2)
    ranks.all("allocate", 10)
    ranks[1].spoil_tokens()
    results = ranks.all("map")
    assert failed(results[0], "PeerError", "rank 1 failed", "token")
    assert failed(results[1], "ConfigError", "token", "rank 0")
    ranks.all("close_buffer")
    assert all(isinstance(count, int) for count in ranks.all("nothing_left"))


def test_a_rank_with_nothing_to_offer_stops_all_at_once_and_the_rendezvous_stays_usable(world: Worlds) -> None:
    ranks = world(3)
    ranks.all("allocate", 10)
    ranks[2].close_buffer()
    ranks[2].foreign()
    begin = time.monotonic()
    results = ranks.all("map")
    assert time.monotonic() - begin < 15
    assert failed(results[2], "RegistrationError", "te.nvlink.allocate()")
    assert failed(results[0], "PeerError", "rank 2 failed")
    assert failed(results[1], "PeerError", "rank 2 failed")
    ranks[2].allocate(10)
    assert ranks.all("map") == [[10] * 3] * 3


def test_a_closed_buffer_is_refused_everywhere(world: Worlds) -> None:
    ranks = world(2)
    ranks.all("allocate", 10)
    ranks[0].close_buffer()
    results = ranks.all("map")
    assert failed(results[0], "EngineClosed")
    assert failed(results[1], "PeerError", "rank 0 failed")


def test_devices_without_access_to_each_other_are_refused(world: Worlds) -> None:
    ranks = world(2)
    ranks.each({0: ("allocate", 10, 0), 1: ("allocate", 10, 1)})
    ranks[0].unreachable(1)
    results = ranks.all("map")
    assert failed(results[0], "ConfigError", "cuda:0 has no access to the memory of rank 1")
    assert failed(results[1], "PeerError", "rank 0 failed")


def test_memory_that_cannot_be_mapped_is_undone_everywhere(world: Worlds) -> None:
    ranks = world(3)
    ranks.all("allocate", 10)
    ranks[1].refuse_map()
    results = ranks.all("map")
    assert failed(results[1], "ConfigError", "rank 2: cannot be mapped")
    assert failed(results[0], "PeerError", "rank 1 failed")
    assert failed(results[2], "PeerError", "rank 1 failed")
    ranks.all("close_buffer")
    assert all(isinstance(count, int) for count in ranks.all("nothing_left"))


def test_ranks_of_other_hosts_are_refused_by_name_without_fabric_handles(world: Worlds) -> None:
    ranks = world(3)
    ranks.all("allocate", 10)
    ranks[2].elsewhere("another boot")
    results = ranks.all("map")
    assert failed(results[0], "ConfigError", "rank 2 (", "other hosts")
    assert failed(results[2], "ConfigError", "ranks 0 (", ", 1 (", "other hosts")


def test_ranks_of_other_hosts_are_mapped_by_fabric_handles(world: Worlds) -> None:
    ranks = world(3)
    for rank, boot in enumerate(["one", "one", "two"]):
        ranks[rank].fabric(boot)
    ranks.all("allocate", 4097)
    assert ranks.all("map") == [[4097] * 3] * 3
    ranks[0].write(2, 5)
    ranks[2].write(1, 6)
    assert ranks[1].check(2, 5)
    assert ranks[0].check(1, 6)
    ranks.all("close_buffer")
    ranks.all("close_mapped")
    assert all(isinstance(count, int) for count in ranks.all("nothing_left"))
