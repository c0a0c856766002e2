"""A device for tests: memory, streams and graphs straight from the driver, so that only what is tested is ours."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np

from transfer_engine import _cuda

SOON_S = 20.0  # a deadline, not a duration
LINE_WORDS = 16  # words apart, so that what different sides write lies in different cache lines


class HostWords:
    """64-bit words of mapped host memory: `words[i]` here, `words.pointer(i)` for kernels."""

    def __init__(self, gpu: Gpu, count: int) -> None:
        flags = gpu.driver.CU_MEMHOSTALLOC_PORTABLE | gpu.driver.CU_MEMHOSTALLOC_DEVICEMAP
        self._gpu = gpu
        self.address = int(gpu.call("cuMemHostAlloc", 8 * count, flags))
        self._device = int(gpu.call("cuMemHostGetDevicePointer", self.address, 0))
        self.words = (ctypes.c_uint64 * count).from_address(self.address)
        ctypes.memset(self.address, 0, 8 * count)

    def pointer(self, index: int = 0) -> int:
        return self._device + 8 * index

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value

    def array(self) -> Any:
        return np.frombuffer(self.words, np.uint64)

    def free(self) -> None:
        self._gpu.call("cuMemFreeHost", self.address)


class DeviceBytes:
    """Memory of the device. `read` and `write` wait for all streams that wait for the default one."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self.nbytes = nbytes
        self.pointer = int(gpu.call("cuMemAlloc", nbytes))
        gpu.call("cuMemsetD8", self.pointer, 0, nbytes)
        gpu.call("cuCtxSynchronize")

    def read(self, dtype: Any = np.uint8) -> Any:
        array = np.empty(self.nbytes, np.uint8)
        self._gpu.call("cuMemcpyDtoH", array.ctypes.data, self.pointer, self.nbytes)
        return array.view(dtype)

    def write(self, array: Any) -> None:
        self._gpu.call("cuMemcpyHtoD", self.pointer, array.ctypes.data, array.nbytes)

    def free(self) -> None:
        self._gpu.call("cuMemFree", self.pointer)


class Gpu:
    """Device `index`, whose primary context is current in this thread from now on.

    Raises:
        TransportUnavailable: there is none.
    """

    def __init__(self, index: int | None = None) -> None:
        self.index = int(os.environ.get("TE_TEST_GPU", "0")) if index is None else index
        self.driver = _cuda.driver("test")
        self.device = _cuda.handle_of(self.driver, self.index, "test")
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", self.device))
        self._owned: list[Any] = []

    def call(self, name: str, *arguments: Any) -> Any:
        return _cuda.check(self.driver, name, *arguments)

    def host_words(self, count: int) -> HostWords:
        self._owned.append(HostWords(self, count))
        return self._owned[-1]

    def device_bytes(self, nbytes: int) -> DeviceBytes:
        self._owned.append(DeviceBytes(self, nbytes))
        return self._owned[-1]

    def stream(self) -> int:
        """One that does not wait for the default stream."""
        return int(self.call("cuStreamCreate", int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def graph(self, stream: int, capture: Any) -> Any:
        """What `capture()` puts into the stream, as a graph that can be launched."""
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.call("cuStreamBeginCapture", stream, mode)
        capture()
        return self.call("cuGraphInstantiate", self.call("cuStreamEndCapture", stream), 0)

    def finished(self, stream: int) -> bool:
        status = self.driver.cuStreamQuery(stream)[0]
        assert int(status) in (0, 600), status  # 600: not ready
        return int(status) == 0

    def wait(self, stream: int, within_s: float = SOON_S) -> None:
        """Never blocks: a kernel that spins for ever fails the test instead of hanging it."""
        deadline = time.monotonic() + within_s
        while not self.finished(stream):
            assert time.monotonic() < deadline, "the stream has not come to its end"

    def free(self) -> None:
        while self._owned:
            self._owned.pop().free()


def until(condition: Any, within_s: float = SOON_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


def sync(gpu: Gpu) -> None:
    gpu.call("cuCtxSynchronize")
