"""Ranks as threads of one process, on the loopback interface."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worlds import SOON_S, DictStore, Ranks, in_threads

import transfer_engine as te


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "TE_CLUSTER_TOKEN",
        "TE_CLUSTER_TOKEN_FILE", "TE_RENDEZVOUS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["own store", "foreign store"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """ranks(count, work): each rank calls work(rendezvous)."""
    if request.param == "foreign store":
        store = DictStore()
        places: Any = store
        yield _runner(lambda: places)
        return
    with te.Rendezvous.serve("127.0.0.1") as server:
        yield _runner(lambda: server.address)


def _runner(place: Callable[[], Any]) -> Ranks:
    def run(count: int, work: Callable[[te.Rendezvous], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            with te.Rendezvous(place(), rank, count, timeout_s=SOON_S) as rendezvous:
                return work(rendezvous)

        return in_threads(count, one)

    return run
