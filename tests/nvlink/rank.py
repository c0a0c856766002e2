"""A rank in a process of its own: `rank.py STORE RANK WORLD_SIZE` answers each line, a command, with a line."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from standin import MemfdDriver, get, put

import transfer_engine as te
from transfer_engine.nvlink import mapping
from transfer_engine.nvlink.card import Card, here
from transfer_engine.nvlink.memory import allocated


def contents(seed: int, length: int) -> bytes:
    return bytes((seed * 37 + i * 11 + (i >> 8)) % 251 for i in range(length))


class Rank:
    def __init__(self, store: str, rank: str, world_size: str) -> None:
        self.rank = int(rank)
        self.driver = MemfdDriver()
        self.rendezvous = te.Rendezvous(store, self.rank, int(world_size), timeout_s=20)
        self.buffer: Any = None
        self.mapped: Any = None

    def fabric(self, boot: str) -> None:
        """On a host of its own."""
        self.driver.fabric = True
        self.elsewhere(boot)

    def elsewhere(self, boot: str) -> None:
        mapping.here = lambda: dataclasses.replace(here(), boot=boot)

    def unreachable(self, device: str) -> None:
        self.driver.unreachable.add(f"device {device}")

    def refuse_map(self) -> None:
        self.driver.refuse_map = True

    def allocate(self, nbytes: int, device: int = 0) -> int:
        self.buffer = allocated(self.driver, nbytes, device)
        return int(self.buffer.nbytes)

    def foreign(self) -> None:
        """No memory that can be shared."""
        self.buffer = type("Foreign", (), {"__cuda_array_interface__": {}})()

    def spoil_tokens(self) -> None:
        """What this rank hears has other tokens."""
        read = Card.from_bytes

        def spoiled(data: bytes) -> Card:
            card = read(data)
            assert card.ticket is not None
            return dataclasses.replace(card, ticket=dataclasses.replace(card.ticket, question=b"?" * 32))

        mapping.Card.from_bytes = staticmethod(spoiled)  # type: ignore[method-assign, assignment]

    def die_once_told(self) -> None:
        """Killed after everybody knows of this rank, before anybody has its memory."""

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        mapping.Counter._answer = lambda *_: None  # type: ignore[method-assign]
        mapping._ensure_offers = die

    def map(self, timeout_s: float = 20) -> list[int]:
        self.mapped = te.nvlink.map_peers(self.buffer, self.rendezvous, timeout_s=timeout_s)
        return [self.mapped[rank].nbytes for rank in self.mapped]

    def write(self, rank: int, seed: int) -> None:
        memory = self.mapped[rank]
        put(memory.pointer, contents(seed, memory.nbytes))

    def check(self, rank: int, seed: int) -> bool:
        memory = self.mapped[rank]
        return get(memory.pointer, memory.nbytes) == contents(seed, memory.nbytes)

    def check_own(self, seed: int) -> bool:
        return get(self.buffer.pointer, self.buffer.nbytes) == contents(seed, self.buffer.nbytes)

    def close_buffer(self) -> None:
        self.buffer.close()

    def close_mapped(self) -> None:
        self.mapped.close()

    def nothing_left(self) -> int:
        """How many descriptors are open."""
        self.driver.assert_nothing_is_left()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def main() -> None:
    rank = Rank(*sys.argv[1:])
    print(json.dumps(["ready"]), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer: list[Any] = ["ok", getattr(rank, name)(*arguments)]
        except te.TransferEngineError as error:
            answer = ["error", type(error).__name__, str(error)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
