"""Many processes of this machine in one group: rounds of scatter and barrier, every byte and count looked at."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import transfer_engine as te

from .rig import SKIPPED, TRANSPORTS

EXCHANGE = Path(__file__).with_name("exchange.py")

transports = pytest.mark.parametrize(
    "transport",
    [
        pytest.param(name, marks=pytest.mark.skipif(name in SKIPPED, reason="TE_TEST_SKIP_TRANSPORTS names it"))
        for name in ("tcp", "shm")
        if name in TRANSPORTS
    ],
)


def exchange(transport: str, world: int, rounds: int, limit_s: float) -> None:
    """Runs the ranks; all must end well. The first that does not ends the others."""
    with te.Rendezvous.serve("127.0.0.1", world_size=world) as server:
        arguments = [str(world), transport, str(rounds), "1"]
        ranks = [
            subprocess.Popen(
                [sys.executable, str(EXCHANGE), server.address, str(rank), *arguments],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            deadline = time.monotonic() + limit_s
            for number, rank in enumerate(ranks):
                _, errors = rank.communicate(timeout=max(deadline - time.monotonic(), 0.1))
                assert rank.returncode == 0, f"rank {number}:\n{errors}"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


@transports
@pytest.mark.multiprocess
def test_six_processes_exchange_thirty_rounds(transport: str) -> None:
    exchange(transport, 6, 30, 100)


@pytest.mark.soak
@transports
@pytest.mark.multiprocess
def test_sixty_four_processes_exchange_a_thousand_rounds(transport: str) -> None:
    exchange(transport, 64, 1000, 3500)
