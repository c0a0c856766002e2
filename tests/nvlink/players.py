"""Ranks in processes of their own, told what to do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transfer_engine as te

SOON_S = 40.0  # a deadline, not a duration


class RankFailed(Exception):
    """What the rank raised."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Player:
    """`player.map()` has the rank call its method of that name."""

    def __init__(self, script: Path, store: str, rank: int, world_size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script), store, str(rank), str(world_size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self.process.stdin.flush()
            return self.answer()

        return call

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RankFailed("Ended", f"with status {self.process.wait(SOON_S)}")
        kind, *rest = json.loads(line)
        if kind == "error":
            raise RankFailed(*rest)
        return rest[0] if rest else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SOON_S)


class World:
    """All ranks. `world.all("map")` has all of them do the same at once; errors are values."""

    def __init__(self, players: list[Player]) -> None:
        self.players = players

    def __getitem__(self, rank: int) -> Player:
        return self.players[rank]

    def each(self, calls: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        def one(rank: int, name: str, *arguments: Any) -> Any:
            try:
                return getattr(self.players[rank], name)(*arguments)
            except RankFailed as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            futures = {rank: pool.submit(one, rank, *call) for rank, call in calls.items()}
            return {rank: future.result(SOON_S) for rank, future in futures.items()}

    def all(self, *call: Any) -> list[Any]:
        return list(self.each(dict.fromkeys(range(len(self.players)), call)).values())


@contextlib.contextmanager
def worlds(script: Path) -> Iterator[Callable[[int], World]]:
    """Starts worlds of processes that run the script, and ends them."""
    players: list[Player] = []
    with te.Rendezvous.serve("127.0.0.1", token=b"") as server:

        def start(size: int) -> World:
            players.extend(Player(script, server.address, rank, size) for rank in range(size))
            for player in players[-size:]:
                player.answer()
            return World(players[-size:])

        try:
            yield start
        finally:
            for player in players:
                player.kill()
                for pipe in (player.process.stdin, player.process.stdout):
                    assert pipe is not None
                    pipe.close()
