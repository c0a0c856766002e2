"""The other side of a scenario: an engine with numbered memories and counters that can be told from afar what to do.

It lives in this process (`Far`) or in one of its own (`Child.far`), with the same methods. Imports nothing of the test
suite, since the child runs it as a script.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import transfer_engine as te

SOON_S = 30.0  # a deadline, not a duration
POISON = 0xA5

Piece = tuple[int, int, int]  # target offset, source offset, length


@functools.lru_cache(maxsize=16)
def pattern(seed: int, length: int) -> np.ndarray[Any, Any]:
    """Bytes that differ from place to place and from seed to seed. Read-only."""
    data = np.frombuffer(np.random.default_rng(seed).bytes(length), np.uint8)
    data.flags.writeable = False
    return data


def first_difference(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> str | None:
    """Where two byte arrays differ, in words; None when they do not."""
    if np.array_equal(found, expected):
        return None
    wrong = np.flatnonzero(found != expected)
    at = int(wrong[0])
    return f"{len(wrong)} wrong bytes from {at} to {int(wrong[-1])}: {found[at]:#x}, expected {expected[at]:#x}"


class Far:
    """A receiver. Memories and counters are numbered from 0."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.engine = te.Engine(settings=te.Settings(**settings))
        self.memories: list[np.ndarray[Any, Any]] = []
        self.regions: list[te.Region] = []
        self.counters: list[te.Counter] = []
        self.flags: list[te.Flag] = []
        self.bindings: list[te.Binding] = []
        self.begun: list[te.Transfer] = []

    def address(self) -> te.Address:
        return self.engine.address

    def describe(self) -> dict[str, Any]:
        return self.engine.describe()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    # --- memory: poisoned until somebody writes -----------------------------------------------------------------------

    def memory(self, length: int) -> tuple[int, te.RegionDescriptor]:
        self.memories.append(np.full(length, POISON, np.uint8))
        self.regions.append(self.engine.register(self.memories[-1]))
        return len(self.memories) - 1, self.regions[-1].descriptor

    def poison(self, number: int) -> None:
        self.memories[number][:] = POISON

    def load(self, number: int, seed: int) -> None:
        self.memories[number][:] = pattern(seed, len(self.memories[number]))

    def read(self, number: int, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(self.memories[number][start:stop])

    def differs(self, number: int, pieces: Sequence[Piece], seed: int, source_length: int) -> str | None:
        """Does it hold these pieces of the pattern, and poison everywhere else? None, or the difference in words."""
        expected = np.full(len(self.memories[number]), POISON, np.uint8)
        source = pattern(seed, source_length)
        for target, offset, length in pieces:
            expected[target : target + length] = source[offset : offset + length]
        return first_difference(self.memories[number], expected)

    def close_memory(self, number: int, timeout_s: float = SOON_S) -> None:
        self.regions[number].close(timeout_s)

    # --- counters ---------------------------------------------------------------------------------------------------

    def counter(self) -> tuple[int, te.CounterDescriptor]:
        self.counters.append(self.engine.counter())
        return len(self.counters) - 1, self.counters[-1].descriptor

    def value(self, number: int) -> int:
        return self.counters[number].value

    def wait(self, number: int, at_least: int, timeout_s: float = SOON_S, peers: Any = None) -> int:
        return self.counters[number].wait(at_least, timeout_s=timeout_s, peers=peers)

    def close_counter(self, number: int, timeout_s: float = SOON_S) -> None:
        self.counters[number].close(timeout_s)

    # --- flags ------------------------------------------------------------------------------------------------------

    def flag(self) -> int:
        self.flags.append(self.engine.flag())
        return len(self.flags) - 1

    def bind(self, counter: int, flag: int, every: int = 1, peers: Any = None) -> int:
        self.bindings.append(self.counters[counter].bind(self.flags[flag], every, peers=peers))
        return len(self.bindings) - 1

    def unbind(self, binding: int) -> None:
        self.bindings[binding].close()

    def flag_value(self, number: int) -> int:
        return self.flags[number].value

    def flag_wait(self, number: int, at_least: int, timeout_s: float = SOON_S) -> int:
        return self.flags[number].wait_value(at_least, timeout_s=timeout_s)

    def flag_check(self, number: int) -> None:
        self.flags[number].check()

    def flag_clear(self, number: int) -> None:
        self.flags[number].clear()

    # --- peers and messages -------------------------------------------------------------------------------------------

    def connect(self, address: te.Address) -> None:
        self.engine.connect(address).wait(SOON_S)

    def peer_state(self, address: te.Address) -> str:
        peer = self.engine.stats()["peers"].get(str(address))
        return "unknown" if peer is None else str(peer["state"])

    def disconnect(self, address: te.Address) -> None:
        self.engine.disconnect(address).wait(SOON_S)

    def fence(self, address: te.Address, timeout_s: float = SOON_S) -> None:
        self.engine.fence(address, timeout_s=timeout_s).wait(SOON_S)

    def send(self, address: te.Address, data: bytes) -> None:
        self.engine.send(address, data).wait(SOON_S)

    def receive(self, timeout_s: float = SOON_S) -> tuple[te.Address, bytes]:
        message = self.engine.receive(timeout_s)
        return message.sender, message.data

    def push(self, number: int, target: te.RegionDescriptor, notify: te.CounterDescriptor | None, times: int) -> None:
        """Writes a whole memory to somebody else's, `times` times in parallel."""
        transfers = [self.engine.write(self.regions[number], target, notify=notify) for _ in range(times)]
        for transfer in transfers:
            transfer.wait(SOON_S)

    def begin(self, number: int, target: te.RegionDescriptor, notify: te.CounterDescriptor, times: int) -> None:
        """As push, but does not wait: when it returns all are submitted, and it submits no more."""
        self.begun += [self.engine.write(self.regions[number], target, notify=notify) for _ in range(times)]

    def finish(self) -> None:
        """Waits until all that was begun has ended, well or not."""
        for transfer in self.begun:
            transfer.exception(SOON_S)

    def close(self) -> None:
        self.engine.close(SOON_S)


class _Remote:
    """Calls a Far in a child: same methods, arguments and results."""

    def __init__(self, child: Child, number: int) -> None:
        self._child = child
        self._number = number

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._child.call, self._number, method)


class Child:
    """A process that holds Fars."""

    def __init__(self) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs[0]), str(ours[1])], pass_fds=(theirs[0], ours[1]), close_fds=True
        )
        os.close(theirs[0])
        os.close(ours[1])
        self._requests = Connection(theirs[1], readable=False)
        self._answers = Connection(ours[0], writable=False)
        self._fars = 0

    def far(self, settings: dict[str, Any]) -> Any:
        """Opens an engine in the child."""
        self.call(-1, "open", settings)
        self._fars += 1
        return _Remote(self, self._fars - 1)

    def call(self, number: int, method: str, *arguments: Any, **named: Any) -> Any:
        self._requests.send_bytes(pickle.dumps((number, method, arguments, named)))
        if not self._answers.poll(2 * SOON_S):
            raise AssertionError(f"the child did not answer {method}{arguments} within {2 * SOON_S:g} s")
        good, value = pickle.loads(self._answers.recv_bytes())
        if not good:
            raise value
        return value

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still, all threads of it."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and the proof that it is gone."""
        self.process.kill()
        self.process.wait(SOON_S)

    def close(self) -> None:
        self._requests.close()
        if self.process.poll() is None:
            self.resume()
            try:
                self.process.wait(SOON_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError("the child did not end") from None
        self._answers.close()


def main(requests: Connection, answers: Connection) -> None:
    """The child: one request after another, until the parent goes."""
    fars: list[Far] = []
    while True:
        try:
            number, method, arguments, named = pickle.loads(requests.recv_bytes())
        except EOFError:
            return
        try:
            if method == "open":
                fars.append(Far(*arguments))
                answer = (True, None)
            else:
                answer = (True, getattr(fars[number], method)(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent shall see it
            answer = (False, error)
        answers.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
