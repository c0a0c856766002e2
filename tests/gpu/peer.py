"""A rank with a GPU: `peer.py STORE RANK WORLD_SIZE` takes commands line by line and answers each with a line."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import transfer_engine as te
from transfer_engine import _cuda
from transfer_engine.kernels import launch

GRID, BLOCK = 64, 256


class Rank:
    def __init__(self, store: str, rank: str, world_size: str) -> None:
        self.rank = int(rank)
        self.rendezvous = te.Rendezvous(store, self.rank, int(world_size), timeout_s=60)
        self.device = 0
        self.buffer: Any = None
        self.mapped: Any = None
        self.tensors: list[Any] = []

    def allocate(self, nbytes: int, device: int) -> list[Any]:
        self.device = device
        self.driver = _cuda.driver("test")
        self.copy = te.kernels.load("copy", device)
        self.buffer = te.nvlink.allocate(nbytes, device)
        with _cuda.current(self.driver, device, "test"):
            self.wrong = _cuda.check(self.driver, "cuMemAlloc", 8)
        return [self.buffer.nbytes, self.buffer.handle_kind, self.buffer.fabric_refusal]

    def map(self) -> list[int]:
        self.mapped = te.nvlink.map_peers(self.buffer, self.rendezvous, timeout_s=60)
        return [self.mapped[rank].nbytes for rank in self.mapped]

    def fill(self, rank: int, seed: int) -> None:
        memory = self.mapped[rank]
        launch(self.copy["te_fill"], None, GRID, BLOCK, memory.pointer, memory.nbytes, seed, 0)
        self._sync()

    def push(self, rank: int) -> None:
        """The own buffer to that rank's."""
        memory = self.mapped[rank]
        count = min(memory.nbytes, self.buffer.nbytes)
        launch(self.copy["te_push"], None, GRID, BLOCK, memory.pointer, self.buffer.pointer, count)
        self._sync()

    def pull(self, rank: int) -> None:
        memory = self.mapped[rank]
        count = min(memory.nbytes, self.buffer.nbytes)
        launch(self.copy["te_pull"], None, GRID, BLOCK, self.buffer.pointer, memory.pointer, count)
        self._sync()

    def wrong_words(self, rank: int, seed: int) -> int:
        """How many words of that rank's memory are not the pattern."""
        memory = self.buffer if rank == self.rank else self.mapped[rank]
        with _cuda.current(self.driver, self.device, "test"):
            _cuda.check(self.driver, "cuMemsetD8", self.wrong, 0, 8)
            launch(self.copy["te_verify"], None, GRID, BLOCK, memory.pointer, memory.nbytes, seed, 0, int(self.wrong))
            result = ctypes.c_uint64()
            _cuda.check(self.driver, "cuMemcpyDtoH", ctypes.addressof(result), self.wrong, 8)
        return result.value

    def fill_by_torch(self, rank: int, value: int) -> list[Any]:
        import torch

        tensor = self.mapped[rank].as_torch()
        tensor.fill_(value)
        torch.cuda.synchronize(self.device)
        self.tensors.append(tensor)
        return [str(tensor.device), list(tensor.shape), tensor.data_ptr() == self.mapped[rank].pointer]

    def sum_by_torch(self) -> int:
        import torch

        return int(self.buffer.as_torch().sum(dtype=torch.int64).item())

    def close_buffer(self) -> None:
        self.buffer.close()

    def close_mapped(self) -> None:
        self.mapped.close()

    def _sync(self) -> None:
        with _cuda.current(self.driver, self.device, "test"):
            _cuda.check(self.driver, "cuCtxSynchronize")


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
