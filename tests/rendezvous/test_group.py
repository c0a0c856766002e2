"""Rendezvous over both kinds of store: everybody hears everybody, and who is late is named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from worlds import SOON_S, DictStore, Ranks, in_threads

import transfer_engine as te


@pytest.mark.parametrize("count", [1, 2, 5])
def test_everybody_gathers_everybodys_bytes_by_rank(ranks: Ranks, count: int) -> None:
    found = ranks(count, lambda r: [r.all_gather(bytes([r.rank]) * r.rank * turn) for turn in range(4)])
    assert found == [[[bytes([rank]) * rank * turn for rank in range(count)] for turn in range(4)]] * count


def test_nobody_passes_a_barrier_before_everybody_is_there(ranks: Ranks) -> None:
    arrived: list[int] = []

    def work(rendezvous: te.Rendezvous) -> int:
        arrived.append(rendezvous.rank)
        rendezvous.barrier()
        return len(arrived)

    assert ranks(4, work) == [4] * 4


def test_the_roots_bytes_reach_all(ranks: Ranks) -> None:
    def work(rendezvous: te.Rendezvous) -> list[bytes]:
        mine = [b"from %d" % rendezvous.rank if rendezvous.rank == root else None for root in range(3)]
        return [rendezvous.broadcast(data, root=root) for root, data in enumerate(mine)]

    assert ranks(3, work) == [[b"from 0", b"from 1", b"from 2"]] * 3


def test_a_megabyte_from_everybody(ranks: Ranks) -> None:
    found = ranks(3, lambda r: [len(data) for data in r.all_gather(bytes(1 << 20))])
    assert found == [[1 << 20] * 3] * 3


def test_who_is_late_is_named_and_the_call_may_be_repeated(ranks: Ranks) -> None:
    everybody = threading.Barrier(3)

    def work(rendezvous: te.Rendezvous) -> list[bytes]:
        if rendezvous.rank != 2:
            for _ in range(2):
                with pytest.raises(te.TransferTimeout, match=r"2 of 3 ranks arrived; missing: rank 2\b") as caught:
                    rendezvous.all_gather(b"%d" % rendezvous.rank, timeout_s=0.1)
                assert caught.value.operation == "all_gather"
                assert caught.value.elapsed_s is not None
            with pytest.raises(te.ConfigError, match="all_gather, was late"):
                rendezvous.barrier()
        everybody.wait(SOON_S)
        return rendezvous.all_gather(b"%d" % rendezvous.rank)

    assert ranks(3, work) == [[b"0", b"1", b"2"]] * 3


def test_a_silent_root_is_named(ranks: Ranks) -> None:
    both = threading.Barrier(2)

    def work(rendezvous: te.Rendezvous) -> bytes:
        if rendezvous.rank == 1:
            with pytest.raises(te.TransferTimeout, match="rank 0"):
                rendezvous.broadcast(timeout_s=0.1)
        both.wait(SOON_S)
        return rendezvous.broadcast(b"late" if rendezvous.rank == 0 else None)

    assert ranks(2, work) == [b"late"] * 2


def test_wrong_arguments_are_refused_before_anything_is_said(ranks: Ranks) -> None:
    def work(rendezvous: te.Rendezvous) -> list[bytes]:
        with pytest.raises(te.ArgumentTypeError):
            rendezvous.all_gather("text")  # type: ignore[arg-type]
        with pytest.raises(te.ArgumentError):
            rendezvous.all_gather(bytes((16 << 20) + 1))
        with pytest.raises(te.ArgumentError):
            rendezvous.barrier(timeout_s=-1)
        with pytest.raises(te.ArgumentError):
            rendezvous.broadcast(b"", root=2)
        if rendezvous.rank == 0:
            with pytest.raises(te.ArgumentError, match="no data"):
                rendezvous.broadcast(root=0)
        return rendezvous.all_gather(bytearray(b"fine"))  # type: ignore[arg-type]

    assert ranks(2, work) == [[b"fine", b"fine"]] * 2


def test_old_keys_are_removed_from_our_own_store() -> None:
    with te.Rendezvous.serve("127.0.0.1", token=b"") as server:

        def work(rank: int) -> None:
            with te.Rendezvous(server.address, rank, 3, timeout_s=SOON_S) as rendezvous:
                for turn in range(20):
                    rendezvous.all_gather(bytes(1000))
                    rendezvous.broadcast(bytes(1000) if rank == turn % 3 else None, root=turn % 3)
                rendezvous.barrier()

        in_threads(3, work)
        assert len(server._board._values) <= 3


def test_several_rendezvous_of_one_process_do_not_mix(ranks: Ranks) -> None:
    def work(first: te.Rendezvous) -> Any:
        with te.Rendezvous(_store_of(first), first.rank, 2, timeout_s=SOON_S) as second:
            return first.all_gather(b"first"), second.all_gather(b"second")

    assert ranks(2, work) == [([b"first"] * 2, [b"second"] * 2)] * 2


def _store_of(rendezvous: te.Rendezvous) -> Any:
    store = rendezvous._store._store  # type: ignore[attr-defined]
    return store if isinstance(store, DictStore) else store.address


def test_torchruns_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with socket.create_server(("127.0.0.1", 0)) as torchruns_own:
        monkeypatch.setenv("MASTER_PORT", str(torchruns_own.getsockname()[1]))

        def work(rank: int) -> list[bytes]:
            with te.Rendezvous(rank=rank, timeout_s=SOON_S) as rendezvous:
                return rendezvous.all_gather(b"%d" % rank)

        assert in_threads(3, work) == [[b"0", b"1", b"2"]] * 3


def test_a_world_of_one_needs_nothing() -> None:
    with te.Rendezvous(rank=0, world_size=1) as alone:
        assert alone.all_gather(b"me") == [b"me"]
        assert alone.broadcast(b"x") == b"x"
        alone.barrier()


def test_a_closed_one_says_so_and_closing_is_idempotent() -> None:
    rendezvous = te.Rendezvous(DictStore(), 0, 1)
    rendezvous.close()
    rendezvous.close()
    with pytest.raises(te.EngineClosed):
        rendezvous.barrier()
    assert "closed" in repr(rendezvous)


def test_what_is_no_store_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(te.ArgumentTypeError, match=r"a dict has no set, wait, add"):
        te.Rendezvous({}, 0, 1)


def test_a_store_that_fails_is_named_with_its_reason() -> None:
    class Broken(DictStore):
        def wait(self, keys: list[str], timeout: Any) -> None:
            raise RuntimeError("Broken pipe\nwith a long trace")

    with pytest.raises(te.PeerUnreachable, match="the Broken failed: Broken pipe"):
        te.Rendezvous(Broken(), 0, 1).barrier()


def test_a_forked_child_can_neither_use_nor_end_what_is_the_parents() -> None:
    with te.Rendezvous(rank=0, world_size=1, timeout_s=SOON_S) as rendezvous:
        child = os.fork()
        if child == 0:
            try:
                rendezvous.barrier()
            except te.ForkedEngine:
                rendezvous.close()
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        rendezvous.barrier()


def test_what_is_dropped_at_once_has_still_told_everybody() -> None:
    """The rank that serves the store forgets it as soon as it has its answer."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "TE_RENDEZVOUS": address, "WORLD_SIZE": "3"}
    program = "import transfer_engine as te; print(te.Rendezvous(timeout_s=60).all_gather(b'x'))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(3)
    ]
    assert [rank.communicate(timeout=100)[0] for rank in ranks] == [b"[b'x', b'x', b'x']\n"] * 3


def test_torch_is_not_imported() -> None:
    assert "torch" not in sys.modules
