"""Which CPU each worker thread is pinned to. Pure.

A worker that spins needs a physical core of its own, and its process another one: the Python threads must run, too. So
one core in two is given away at most; with fewer, hardware threads; with fewer still, none, and workers then sleep when
idle. Siblings of a chosen CPU are left alone, and the machine's first core is taken last: interrupts like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cpusets import to_list
from .model import Core, Topology
from .words import count


@dataclass(frozen=True, slots=True)
class Anchor:
    """What a worker should be near to: its first NIC, else its GPU. None: anywhere."""

    numa: int | None = None
    package: int | None = None


def choose(
    topology: Topology, anchors: Sequence[Anchor], allowed: frozenset[int], *, quota: float | None = None
) -> tuple[list[int | None], list[str]]:
    """A CPU for each worker, all on different cores, and what there is to say about it.

    Args:
        topology: of the machine.
        anchors: one a worker.
        allowed: the CPUs that this process, and those beside it, may use.
        quota: how many CPUs' time the control group grants; None: no limit.
    """
    cores = [core for core in topology.cores if allowed & set(core.cpus)]
    if not anchors or not cores:
        return [None] * len(anchors), ["no CPU is known that this process may use"] * bool(anchors)
    threads = [(core, cpu) for core in cores for cpu in core.cpus if cpu in allowed]
    wanted, granted = 2 * len(anchors), len(threads) if quota is None else min(len(threads), int(quota))
    here = f"{count(len(cores), 'core')} ({to_list(cpu for _, cpu in threads)}) may be used"
    if granted < len(threads):
        here += f", {quota:g} CPUs' time is granted"
    if granted >= wanted and len(cores) >= wanted:
        return _pick([(core, min(set(core.cpus) & allowed)) for core in cores], anchors), []
    need = f"{count(len(anchors), 'worker')} would need {wanted} (one each, and one for each one's process)"
    if granted >= wanted:
        note = f"{here}, {need}: workers share their core with its SMT sibling"
        return _pick(threads, anchors), [note]
    return [None] * len(anchors), [f"{here}, {need}: workers are not pinned, and sleep when idle instead of spinning"]


def _pick(candidates: list[tuple[Core, int]], anchors: Sequence[Anchor]) -> list[int | None]:
    """The nearest for everybody: near ones are given out before anybody gets a far one."""
    first_core = min(core.index for core, _ in candidates)

    def rank(entry: tuple[Core, int]) -> tuple[bool, bool, int]:
        core, cpu = entry
        return cpu != core.cpus[0], core.index == first_core, cpu

    free = sorted(candidates, key=rank)
    chosen: list[int | None] = [None] * len(anchors)
    for reach in (_same_node, _same_package, _anywhere):
        for worker, anchor in enumerate(anchors):
            if chosen[worker] is None:
                found = next((entry for entry in free if reach(anchor, entry[0])), None)
                if found is not None:
                    free.remove(found)
                    chosen[worker] = found[1]
    return chosen


def _same_node(anchor: Anchor, core: Core) -> bool:
    return anchor.numa is not None and anchor.numa == core.numa


def _same_package(anchor: Anchor, core: Core) -> bool:
    return anchor.package is not None and anchor.package == core.package


def _anywhere(_anchor: Anchor, _core: Core) -> bool:
    return True
