"""What every scenario stands on: the transports and how to choose among them, two sides with guarded memory, and waits
on conditions with deadlines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .farside import POISON, SOON_S, Child, Far, Piece, pattern

__all__ = [
    "BOUND_S", "LIFE_S", "POISON", "SLOWNESS", "SOON_S", "Case", "Child", "Far", "Link", "Mortal", "Piece", "Rig",
    "Transport", "eventually", "in_threads", "laid_out", "on", "on_mortals", "pattern", "permutation",
]  # fmt: skip

# How much longer a machine that is emulated takes for what has a bound.
SLOWNESS = 4 if os.environ.get("TE_RDMA_GUEST") else 1


LIFE_S = 0.6 * SLOWNESS  # peer_timeout_s of tests in which peers die
BOUND_S = LIFE_S + 3.0 * SLOWNESS  # until it is noticed: this machine may be busy


@dataclass(frozen=True)
class Transport:
    """What the suite must know before it opens an engine; the rest is asked of engine.describe()."""

    name: str  # as the suite calls it
    apart: bool  # engines of different processes can meet
    faults: bool  # faults can be injected
    nics: tuple[str, ...] | None = None  # tests keep to the loopback interface
    options: str | None = None
    asked: str = ""  # the engine's transport, where it has another name
    devices: tuple[str, ...] = ()  # NICs to choose from; the two sides take them from the two ends
    environment: tuple[tuple[str, str], ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()  # settings of all engines

    @property
    def engine(self) -> str:
        return self.asked or self.name

    def settings(self, nics: int, *, far: bool) -> dict[str, Any]:
        """Settings of an engine with that many NICs on one of the two sides."""
        names = (self.devices[::-1] if far else self.devices)[:nics] or self.nics
        return {
            "transport": self.engine,
            "nics": names,
            "nic_count": nics,
            "sim": self.options,
            **dict(self.changes),
        }


def standin(name: str, transport: str, devices: list[str], environment: dict[str, str]) -> Transport:
    """A transport whose library is a stand-in, with devices that exist in one process."""
    return Transport(
        name,
        apart=False,
        faults=False,
        asked=transport,
        devices=tuple(devices),
        environment=tuple(environment.items()),
    )


def on_this_machine() -> list[Transport]:
    """In a guest with RDMA devices: these. Elsewhere the software fabrics, and cx7 and efa over stand-ins for their
    libraries."""
    if os.environ.get("TE_RDMA_GUEST"):
        # The guest is emulated, and memory that is touched costs it dearly.
        small = {"max_peers": 16, "immediate_window": 64, "nic_depth": 128, "operations": 1024, "max_regions": 4096}
        devices = tuple(sorted(device.name for device in Path("/sys/class/infiniband").iterdir()))
        return [Transport("rxe", apart=True, faults=False, asked="cx7", devices=devices, changes=tuple(small.items()))]
    # The simulated fabric is set to be unfriendly: out of order, in pieces, sometimes busy.
    unfriendly = "delay=2,mtu=1000,busy=0.02,seed=1"
    found = [
        Transport("sim", apart=False, faults=True, options=unfriendly),
        Transport("tcp", apart=True, faults=False, nics=("lo",)),
        Transport("shm", apart=True, faults=False),
    ]
    count = 16
    if library := os.environ.get("TE_TEST_STANDIN"):
        environment = {
            "TE_LIBIBVERBS": library,
            "TE_RDMA_ROOT": str(Path(library).with_name("standin")),
            "TE_STANDIN_DEVICES": str(count),
        }
        found.append(standin("standin", "cx7", [f"standin{i}" for i in range(count)], environment))
    if library := os.environ.get("TE_TEST_STANDIN_FABRIC"):
        environment = {"TE_LIBFABRIC": library, "TE_STANDIN_FABRIC": f"devices={count},eagain=0.01"}
        found.append(standin("standin_efa", "efa", [f"efa{i}" for i in range(count)], environment))
    return found


TRANSPORTS = {transport.name: transport for transport in on_this_machine()}
# Transports that may be missing here; anything else that is missing fails the suite.
SKIPPED = tuple(os.environ.get("TE_TEST_SKIP_TRANSPORTS", "").replace(",", " ").split())


@dataclass(frozen=True)
class Case:
    """One way to run a scenario."""

    transport: Transport
    nics: int
    far_nics: int
    apart: bool  # the far side is a process of its own
    label: str = ""
    changes: tuple[tuple[str, Any], ...] = ()  # settings of both sides

    def __str__(self) -> str:
        if self.label:
            return self.label
        count = str(self.nics) if self.nics == self.far_nics else f"{self.nics}to{self.far_nics}"
        return f"{self.transport.name}{'-apart' if self.apart else ''}-{count}"

    def settings(self, *, far: bool = False, **changes: Any) -> dict[str, Any]:
        count = changes.pop("nic_count", self.far_nics if far else self.nics)
        return {
            **self.transport.settings(count, far=far),
            "core": "none",
            "timeout_s": SOON_S,
            **dict(self.changes),
            **changes,
        }


def on(
    *,
    nics: Iterable[int | tuple[int, int]] = (2,),
    nics_apart: Iterable[int | tuple[int, int]] | None = None,
    apart: bool | None = None,
    faults: bool = False,
    transports: Iterable[str] = tuple(TRANSPORTS),
) -> pytest.MarkDecorator:
    """Where a scenario runs: NIC counts (or pairs of them, near and far), others perhaps where it is two processes; one
    process or two (None: both); whether it needs injected faults. Without this mark: everywhere, with two NICs."""
    counts = {False: list(nics), True: list(nics if nics_apart is None else nics_apart)}
    cases = [
        Case(transport, *(count if isinstance(count, tuple) else (count, count)), placed)
        for transport in (TRANSPORTS[name] for name in transports if name in TRANSPORTS)
        if transport.faults or not faults
        for placed in ((False, True) if apart is None else (apart,))
        if transport.apart or not placed
        for count in counts[placed]
        if not transport.devices or np.max(count) <= len(transport.devices)
    ]
    return pytest.mark.cases(cases)


class Link:
    """A source here, poisoned memory of the same length over there, and a counter."""

    def __init__(self, rig: Rig, length: int, far: Any = None, near: te.Engine | None = None) -> None:
        self.far = far or rig.far
        self.near = near or rig.near
        self.length = length
        self.seed = rig.next_seed()
        self.source = pattern(self.seed, length)
        self.region = self.near.register(self.source)
        self.memory, remote = self.far.memory(length)
        self.counter, notify = self.far.counter()
        self.remote = te.RegionDescriptor.from_bytes(bytes(remote))
        self.notify = te.CounterDescriptor.from_bytes(bytes(notify))

    def write(self, target: int, source: int, length: int, *, notify: bool = True, **arguments: Any) -> te.Transfer:
        return self.near.write(
            self.region[source : source + length],
            self.remote[target : target + length],
            notify=self.notify if notify else None,
            **arguments,
        )

    def pages(
        self, targets: Any, sources: Any, page: int, *, notify: bool = True, stride: int | None = None, **arguments: Any
    ) -> te.Transfer:
        return self.near.write_pages(
            te.Pages(self.region, sources, page, stride),
            te.Pages(self.remote, targets, page, stride),
            notify=self.notify if notify else None,
            **arguments,
        )

    def wait(self, at_least: int, timeout_s: float = SOON_S, peers: Any = None) -> int:
        """Waits for the counter, over there."""
        value: int = self.far.wait(self.counter, at_least, timeout_s, peers)
        return value

    @property
    def value(self) -> int:
        value: int = self.far.value(self.counter)
        return value

    def poison(self) -> None:
        self.far.poison(self.memory)

    def holds(self, pieces: Iterable[Piece]) -> bool:
        return self.far.differs(self.memory, list(pieces), self.seed, self.length) is None

    def check(self, pieces: Iterable[Piece], count: int | None = None) -> None:
        """The far memory holds these pieces and nothing else; the counter stands at `count`."""
        difference = self.far.differs(self.memory, list(pieces), self.seed, self.length)
        assert difference is None, difference
        if count is not None:
            assert self.value == count


class Rig:
    """Two sides and what they need. `near` is an engine of this process, `far` is told what to do."""

    def __init__(self, case: Case, spawn: Callable[[], Child], shared: Callable[[], Child]) -> None:
        self.case = case
        self.clean = True  # at the end nothing stray may have been seen; tests of foul play say otherwise
        self._spawn = spawn
        self._shared = shared
        self._seeds = 0
        self._engines: list[te.Engine] = []
        self._fars: list[Any] = []
        self._near: te.Engine | None = None
        self._far: Any = None

    @property
    def near(self) -> te.Engine:
        if self._near is None:
            self._near = self.engine()
        return self._near

    @property
    def far(self) -> Any:
        if self._far is None:
            self._far = self.another_far()
        return self._far

    def set_up(self, **settings: Any) -> None:
        """Opens both sides with these settings."""
        self._near = self.engine(**settings)
        self._far = self.another_far(**settings)

    def engine(self, **settings: Any) -> te.Engine:
        engine = te.Engine(settings=te.Settings(**self.case.settings(**settings)))
        self._engines.append(engine)
        return engine

    def another_far(self, child: Child | None = None, **settings: Any) -> Any:
        """One more far side: in `child`, else where the case wants it."""
        wanted = self.case.settings(far=True, **settings)
        if child is None and self.case.apart:
            child = self._shared()
        far: Any = Far(wanted) if child is None else child.far(wanted)
        if child is None or child is self._shared():
            self._fars.append(far)
        return far

    def spawn(self) -> Child:
        """A process of its own, that may be stopped and killed."""
        return self._spawn()

    def link(self, length: int = 1 << 16, far: Any = None, near: te.Engine | None = None) -> Link:
        return Link(self, length, far, near)

    def next_seed(self) -> int:
        self._seeds += 1
        return self._seeds

    def close(self) -> None:
        stray = {}
        if self.clean:
            for side in [*(e for e in self._engines if not e.closed), *self._fars]:
                try:
                    stats = side.stats()["engine"]
                except te.EngineClosed:
                    continue
                stray.update({key: stats[key] for key in ("stray_immediates", "damaged_messages") if stats[key]})
        for far in self._fars:
            far.close()
        for engine in self._engines:
            engine.close(SOON_S)
        assert not stray, f"seen at the end: {stray}"


class Mortal:
    """A far side that can die: by SIGKILL in a process of its own, or by an injected fault."""

    def __init__(self, rig: Rig, **settings: Any) -> None:
        self._child: Child | None = rig.spawn() if rig.case.apart else None
        self.far = rig.another_far(self._child, **settings)

    def kill(self) -> None:
        if self._child is None:
            self.far.engine._inject("kill")
        else:
            self._child.kill()


# The simulated fabric kills engines of this process; elsewhere a process is killed. Not on shm: libfabric 1.17 waits
# for ever for a lock that the killed process held (one time in ten), and a long write to the dead stops all long
# writes of that NIC. See "Known limits" in docs/contract.md.
on_mortals = pytest.mark.cases(
    [*on(nics=(2,), faults=True).mark.args[0], *on(nics=(2,), apart=True, transports=("tcp", "rxe")).mark.args[0]]
)


def eventually(condition: Callable[[], Any], timeout_s: float = SOON_S) -> Any:
    """Looks again until the condition holds, and returns what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {condition}"
        time.sleep(0.001)
    return found


def in_threads(count: int, work: Callable[[int], None], bound_s: float = 2 * SOON_S) -> None:
    """Runs work(0) ... work(count - 1), all begun at one moment; whatever they raise is raised here."""
    gate = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            gate.wait(SOON_S)
            work(k)
        except BaseException as error:  # noqa: BLE001 - handed on below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(bound_s)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def laid_out(lengths: Iterable[int], gap: int = 37, shift: int = 3) -> tuple[list[Piece], int]:
    """A place for each length, with gaps between them and other offsets at the source; and the bytes needed."""
    pieces, at = [], gap
    for i, length in enumerate(lengths):
        pieces.append((at, at - i % (shift + 1), length))
        at += length + gap + i % 5
    return pieces, at + gap


def permutation(seed: int, count: int, of: int | None = None) -> np.ndarray[Any, Any]:
    """`count` distinct numbers below `of`, in random order."""
    return np.random.default_rng(seed).permutation(of or count)[:count]
