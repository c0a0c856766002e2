"""An engine with device memory in a process of its own; started and told what to do as peer.py is."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import transfer_engine as te
from transfer_engine import _cuda
from transfer_engine.kernels import launch

GRID, BLOCK = 64, 256


class Side:
    def __init__(self, *_: str) -> None:
        self.memory: dict[str, tuple[int, int]] = {}  # name -> pointer, bytes
        self.regions: dict[str, te.Region] = {}
        self.keep: list[Any] = []

    def open_on(self, transport: str, device: int, nics: str | None, peer_timeout_s: float = 3.0) -> str:
        self.device = device
        self.driver = _cuda.driver("test")
        self.copy = te.kernels.load("copy", device)
        self.engine = te.Engine(transport, nics=nics, settings=te.Settings(peer_timeout_s=peer_timeout_s))
        self.counter = self.engine.counter()
        with _cuda.current(self.driver, device, "test"):
            self.wrong = int(_cuda.check(self.driver, "cuMemAlloc", 8))
        return bytes(self.counter.descriptor).hex()

    def address(self) -> str:
        return bytes(self.engine.address).hex()

    def stage(self, name: str, nbytes: int) -> str:
        """Device memory, registered with staging; gives its descriptor."""
        with _cuda.current(self.driver, self.device, "test"):
            pointer = int(_cuda.check(self.driver, "cuMemAlloc", nbytes))
            _cuda.check(self.driver, "cuMemsetD8", pointer, 0xA5, nbytes)
            _cuda.check(self.driver, "cuCtxSynchronize")
        self.memory[name] = (pointer, nbytes)
        self.regions[name] = self.engine.register((pointer, nbytes, f"cuda:{self.device}"), staging=True)
        assert self.regions[name].reach == "staged"
        return bytes(self.regions[name].descriptor).hex()

    def allocate(self, name: str, nbytes: int) -> str:
        """Memory that both the GPU and the NIC reach."""
        buffer = self.engine.allocate(nbytes, device=f"cuda:{self.device}")
        self.keep.append(buffer)
        self.memory[name] = (buffer.device_pointer, nbytes)
        self.regions[name] = buffer.region
        return bytes(buffer.region.descriptor).hex()

    def fill(self, name: str, seed: int) -> None:
        pointer, nbytes = self.memory[name]
        launch(self.copy["te_fill"], None, GRID, BLOCK, pointer, nbytes, seed, 0)
        self._sync()

    def wrong_words(self, name: str, seed: int) -> int:
        """How many words are not the pattern, as the device sees them."""
        pointer, nbytes = self.memory[name]
        with _cuda.current(self.driver, self.device, "test"):
            _cuda.check(self.driver, "cuMemsetD8", self.wrong, 0, 8)
            launch(self.copy["te_verify"], None, GRID, BLOCK, pointer, nbytes, seed, 0, self.wrong)
            result = ctypes.c_uint64()
            _cuda.check(self.driver, "cuMemcpyDtoH", ctypes.addressof(result), self.wrong, 8)
        return result.value

    def byte(self, name: str, offset: int) -> int:
        pointer, _ = self.memory[name]
        value = ctypes.c_uint8()
        with _cuda.current(self.driver, self.device, "test"):
            _cuda.check(self.driver, "cuMemcpyDtoH", ctypes.addressof(value), pointer + offset, 1)
        return value.value

    def write(self, name: str, remote: str, notify: str, begin: int, end: int, at: int) -> None:
        target = te.RegionDescriptor.from_bytes(bytes.fromhex(remote))
        counter = te.CounterDescriptor.from_bytes(bytes.fromhex(notify))
        region = self.regions[name]
        self.engine.write(region[begin:end], target[at : at + end - begin], notify=counter, timeout_s=60).wait()

    def write_ahead(self, name: str, remote: str, notify: str, nbytes: int) -> None:
        """Starts a write and does not wait for it."""
        target = te.RegionDescriptor.from_bytes(bytes.fromhex(remote))
        counter = te.CounterDescriptor.from_bytes(bytes.fromhex(notify))
        self.keep.append(self.engine.write(self.regions[name][0:nbytes], target[0:nbytes], notify=counter))

    def wait(self, count: int) -> int:
        return self.counter.wait(count, timeout_s=60)

    def close(self) -> None:
        self.engine.close()

    def _sync(self) -> None:
        with _cuda.current(self.driver, self.device, "test"):
            _cuda.check(self.driver, "cuCtxSynchronize")


def main() -> None:
    side = Side(*sys.argv[1:])
    print(json.dumps(["ready"]), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer: list[Any] = ["ok", getattr(side, name)(*arguments)]
        except te.TransferEngineError as error:
            answer = ["error", type(error).__name__, str(error)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
