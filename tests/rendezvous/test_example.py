"""The example that users start with torchrun, started as torchrun starts it, and by torchrun itself where torch is."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import transfer_engine as te

EXAMPLE = Path(__file__).parents[2] / "docs/examples/torchrun_exchange.py"
RANKS = 4
DEADLINE_S = 100


@contextmanager
def torchruns_port() -> Iterator[int]:
    """A port that is taken, as torchrun's own store takes MASTER_PORT."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def environment(port: int, rank: int) -> dict[str, str]:
    launcher = {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return {**os.environ, **launcher, "TE_NICS": "lo", "TE_POLLING": "adaptive"}


def run_all(command: list[str], port: int) -> list[tuple[int, str]]:
    """Exit status and output of each rank; none outlives the deadline."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=environment(port, rank), **options) for rank in range(RANKS)]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_four_processes_exchange_writes_and_verify_them(transport: str) -> None:
    try:
        te.probe(transport)
    except te.TransportUnavailable as cause:
        pytest.skip(cause.message)
    with torchruns_port() as port:
        results = run_all([sys.executable, str(EXAMPLE), "--transport", transport], port)
    expected = 3 * (RANKS - 1) << 20
    for rank, (status, output) in enumerate(results):
        assert status == 0, output
        assert f"rank {rank} of {RANKS} on {transport}: {expected} bytes verified" in output


DIES = """
import os, sys
import transfer_engine as te

with te.Rendezvous(timeout_s=30) as group:
    group.barrier()
    if group.rank == 2:
        os._exit(9)
    try:
        group.all_gather(b"", timeout_s=1)
    except te.TransferTimeout as late:
        print(late)
        sys.exit(0 if "rank 2 (lost" in str(late) and "rank 1" not in str(late) else 1)
"""

FIRST_DIES = """
import os, sys
import transfer_engine as te

with te.Rendezvous(timeout_s=30) as group:
    try:
        group.barrier()
        if group.rank == 0:
            os._exit(9)
        group.barrier(timeout_s=20)
    except te.PeerUnreachable as gone:
        print(gone)
        sys.exit(0 if "rank 0" in str(gone) else 1)
"""


@pytest.mark.multiprocess
def test_a_dead_rank_is_named_to_the_others_by_their_time_out() -> None:
    with torchruns_port() as port:
        results = run_all([sys.executable, "-c", DIES], port)
    assert [status for status, _ in results] == [0, 0, 9, 0], results


@pytest.mark.multiprocess
def test_the_death_of_the_rank_that_serves_the_store_is_known_at_once() -> None:
    with torchruns_port() as port:
        results = run_all([sys.executable, "-c", FIRST_DIES], port)
    assert [status for status, _ in results] == [9, 0, 0, 0], results


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@needs_torch
@pytest.mark.multiprocess
@pytest.mark.slow
def test_under_real_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    done = subprocess.run(
        [*command, str(EXAMPLE), "--transport", "tcp"],
        env={**os.environ, "TE_NICS": "lo", "TE_POLLING": "adaptive"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bytes verified") == RANKS


WITH_TORCHS_STORE = """
import os
from datetime import timedelta
import torch.distributed as dist
import transfer_engine as te

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port = int(os.environ["TORCH_STORE_PORT"])
store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=30))
with te.Rendezvous(store) as group:
    for turn in range(10):
        assert group.all_gather(b"%d/%d" % (rank, turn)) == [b"%d/%d" % (one, turn) for one in range(size)]
    assert group.broadcast(b"\\x00\\xff" if rank == 1 else None, root=1) == b"\\x00\\xff"
    if rank == 3:
        store.wait(["late/0", "late/1", "late/2"], timedelta(seconds=30))
    else:
        try:
            group.barrier(timeout_s=0.5)
        except te.TransferTimeout as late:
            assert "missing: rank 3 " in str(late), late
            store.set(f"late/{rank}", "yes")
    group.barrier(timeout_s=30)
"""


@needs_torch
@pytest.mark.multiprocess
@pytest.mark.slow
def test_torchs_own_store_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("TORCH_STORE_PORT", str(free.getsockname()[1]))
    with torchruns_port() as port:
        results = run_all([sys.executable, "-c", WITH_TORCHS_STORE], port)
    assert [status for status, _ in results] == [0] * RANKS, results
