"""Which NICs and which core each process of a node gets. Pure: all that is looked at is in the arguments.

The rules, in order:

1. NICs that the settings name are used as they are, by every process that has these settings.
2. Otherwise the NICs of one model are used: the one with the most bandwidth in total, since peers pair NICs one to one
   and a transfer that is cut over unequal NICs waits for the slowest.
3. They are dealt out so that everybody has as many as anybody else, or one more, and everybody one near NIC before
   anybody a second: nearest by PCIe, then by NUMA node; NIC i goes with GPU i where distances do not decide.
4. A NIC on another NUMA node is not used beside a nearer one.
5. With fewer NICs than workers, NICs are shared.

Every NIC is in some share or in `left_out` with the reason. Processes of one node that compute the plan from the same
topology get the same plan, so their shares are disjoint without a word between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..settings import Settings
from . import cores
from .identify import product_of
from .matching import spread
from .model import NOWHERE, Distance, Nic, Place, Topology, distance, hops
from .words import count

MOST_NICS = 16  # of one engine
_RDMA_TRANSPORTS = ("efa", "cx7")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker gets: the one of process `local_rank` that serves GPU `gpu` (None: the host).

    Attributes:
        local_rank: of the process.
        gpu: index in `Topology.gpus`, or None.
        nics: names, nearest first, as `te.Engine(nics=...)` takes them.
        distances: of each NIC from the GPU.
        core: the CPU to pin the worker to; None: do not pin.
    """

    local_rank: int
    gpu: int | None
    nics: tuple[str, ...]
    distances: tuple[Distance, ...]
    core: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A NIC that nobody uses, and why."""

    nic: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The shares of all workers of a node, what is left over, and what there is to say about it."""

    shares: tuple[Share, ...]
    left_out: tuple[LeftOut, ...]
    messages: tuple[str, ...]

    def of(self, local_rank: int) -> tuple[Share, ...]:
        """The shares of one process."""
        return tuple(share for share in self.shares if share.local_rank == local_rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only: `json.dumps` takes it as it is."""
        shares = [{**asdict(share), "distances": [one.label for one in share.distances]} for share in self.shares]
        return {
            "shares": shares,
            "left_out": [asdict(entry) for entry in self.left_out],
            "messages": list(self.messages),
        }


def plan(
    topology: Topology,
    workers: Sequence[tuple[int, int | None]],
    settings: Settings | None = None,
    *,
    allowed: frozenset[int] | None = None,
    quota: float | None = None,
    cores_for: int | None = None,
) -> Plan:
    """Deals out the NICs and cores of a node. It depends on the set of GPUs, not on which process serves which.

    Args:
        topology: of the machine.
        workers: (local rank, index of the GPU or None for the host), one a worker.
        settings: `transport` says which kind of NIC, `nics` and `nic_count` restrict; None: no wishes.
        allowed: CPUs that may be used; None: all.
        quota: how many CPUs' time is granted; None: no limit.
        cores_for: the CPUs are those of this local rank alone, so that only its workers get any; None: of all.
    """
    workers = sorted(workers, key=lambda worker: (-1 if worker[1] is None else worker[1], worker[0]))
    transport = settings.transport if settings else None
    wanted = settings.nics if settings else None
    most = min((settings.nic_count if settings else None) or MOST_NICS, MOST_NICS)
    candidates, left_out = _usable(topology.nics, transport)
    known = candidates + [nic for nic in topology.nics if nic.for_rdma]
    messages: list[str] = []
    if wanted is not None:
        by_name = {nic.name: nic for nic in reversed(known)}
        named = [by_name[name] for name in wanted if name in by_name]
        if transport is None or transport in _RDMA_TRANSPORTS:  # others also take addresses and interfaces without NIC
            messages += [f"{name}: no NIC of this name is known here" for name in wanted if name not in by_name]
        left_out = [entry for entry in left_out if entry.nic not in wanted]
        left_out += _all_left(candidates, set(wanted), "not among the NICs that the settings name")
        dealt = [list(named) for _ in workers]
    else:
        candidates, others = _one_model(candidates)
        left_out += others
        places = [NOWHERE if gpu is None else topology.gpus[gpu].place for _, gpu in workers]
        dealt, far = _deal(candidates, places)
        left_out += [LeftOut(nic=nic.name, reason=_FAR) for nic in far]
        messages += _remarks(topology, candidates, workers, dealt)
    shares, over = [], []
    for (rank, gpu), nics in zip(workers, dealt, strict=True):
        over += nics[most:]
        place = NOWHERE if gpu is None else topology.gpus[gpu].place
        names = tuple(nic.name for nic in nics[:most])
        near = tuple(distance(place, nic.place) for nic in nics[:most])
        shares.append(Share(local_rank=rank, gpu=gpu, nics=names, distances=near, core=None))
    kept = {name for share in shares for name in share.nics}
    reason = f"one engine uses at most {count(most, 'NIC')}" + (" (setting nic_count)" if most < MOST_NICS else "")
    left_out += _all_left(over, kept, reason)
    may_use = topology.cpus if allowed is None else allowed & topology.cpus
    pinned = [index for index, share in enumerate(shares) if cores_for in (None, share.local_rank)]
    wish = settings.core if settings else "auto"
    if wish == "auto":
        anchors = [_anchor(topology, shares[index], dealt[index]) for index in pinned]
        chosen, remarks = cores.choose(topology, anchors, may_use, quota=quota)
    else:
        chosen, remarks = [wish if isinstance(wish, int) else None] * len(pinned), []
    for index, core in zip(pinned, chosen, strict=True):
        shares[index] = replace(shares[index], core=core)
    shares.sort(key=lambda share: (share.local_rank, share.gpu or 0))
    return Plan(shares=tuple(shares), left_out=tuple(left_out), messages=tuple(messages + remarks))


_FAR = "on another NUMA node than every GPU or process that could use it, all of which have nearer NICs"


def _usable(nics: Sequence[Nic], transport: str | None) -> tuple[list[Nic], list[LeftOut]]:
    """The NICs that a transport can use, under the names by which it knows them.

    RDMA transports know devices, the others interfaces. Without a transport: RDMA devices where there are any.
    """
    if transport in ("shm", "sim"):
        return [], [LeftOut(nic=nic.name, reason=f"the {transport} transport uses no NIC") for nic in nics]
    rdma = transport in _RDMA_TRANSPORTS or (
        transport is None and any(nic.for_rdma and nic.unusable is None for nic in nics)
    )
    good: list[Nic] = []
    bad: list[LeftOut] = []
    for nic in nics:
        reason = None
        if rdma and nic.unusable is not None:
            reason = nic.unusable
        elif rdma and not nic.for_rdma:
            reason = "it has no RDMA device"
        elif rdma and transport is not None and (transport == "efa") != nic.model.startswith("1d0f:"):
            reason = f"the {transport} transport does not drive this model"
        elif not rdma and not nic.interfaces:
            reason = nic.unusable or "it has no network interface"
        if reason is not None:
            bad.append(LeftOut(nic=nic.name, reason=reason))
        elif rdma:
            good.append(nic)
        else:
            taken = {one.name for one in good}
            good += [replace(nic, name=name, interfaces=(name,)) for name in nic.interfaces if name not in taken]
    return good, bad


def _one_model(nics: list[Nic]) -> tuple[list[Nic], list[LeftOut]]:
    """The NICs of the model, and link rate, that has the most bandwidth in total; of equals the faster NIC."""
    groups: defaultdict[tuple[str, float], list[Nic]] = defaultdict(list)
    for nic in nics:
        groups[nic.model, nic.rate_gbps or nic.pcie_gbps or 0.0].append(nic)
    if len(groups) < 2:
        return nics, []

    def worth(key: tuple[str, float]) -> tuple[float, float, int, str]:
        return (key[1] * len(groups[key]), key[1], len(groups[key]), key[0])

    best = max(groups, key=worth)
    left_out = [
        LeftOut(
            nic=nic.name,
            reason=f"of another kind ({_kind(key)}) than the {count(len(groups[best]), 'NIC')} used ({_kind(best)})",
        )
        for key, group in groups.items()
        if key != best
        for nic in group
    ]
    return groups[best], left_out


def _kind(key: tuple[str, float]) -> str:
    model, rate = key
    product = product_of(model)
    name = f"{product}, {model}" if product else model
    return f"{name}, {rate:g} Gb/s" if rate else name


def _deal(nics: list[Nic], places: Sequence[Place]) -> tuple[list[list[Nic]], list[Nic]]:
    """Rules 3 to 5: the NICs of each worker, nearest first, and those too far from everybody."""
    dealt: list[list[Nic]] = [[] for _ in places]
    if not nics or not places:
        return dealt, list(nics)
    most = max(len(nics), len(places))
    step = 4 * most * most + 1  # more than all differences in order together

    def cost(nic: int, worker: int) -> int:
        place, other = places[worker], nics[nic].place
        apart = distance(place, other)
        if len(nics) >= len(places):
            order = abs(nic * len(places) // len(nics) - worker)
        else:
            order = abs(worker * len(nics) // len(places) - nic)
        return (int(apart) ** 2 * 64 + min(hops(place, other), 63)) * step + order

    if len(nics) >= len(places):
        for nic, worker in enumerate(spread(len(nics), len(places), cost)):
            dealt[worker].append(nics[nic])
    else:
        for worker, nic in enumerate(spread(len(places), len(nics), lambda worker, nic: cost(nic, worker))):
            dealt[worker].append(nics[nic])
    dealt = [_near_only(place, mine) for place, mine in zip(places, dealt, strict=True)]
    used = {nic.name for mine in dealt for nic in mine}
    return dealt, [nic for nic in nics if nic.name not in used]


def _near_only(place: Place, nics: list[Nic]) -> list[Nic]:
    """Nearest first; without those on another NUMA node where there is a nearer one."""
    ordered = sorted(nics, key=lambda nic: (distance(place, nic.place), hops(place, nic.place)))
    near = [nic for nic in ordered if not distance(place, nic.place).far]
    return near or ordered


def _remarks(
    topology: Topology, nics: list[Nic], workers: Sequence[tuple[int, int | None]], dealt: list[list[Nic]]
) -> list[str]:
    """What a person should know about the dealing."""
    remarks = []
    if nics and len(nics) < len(workers):
        who = "GPU" if workers[0][1] is not None else "worker"
        remarks.append(f"{count(len(nics), 'NIC')} for {count(len(workers), who)}: some share a NIC")
    for (_, gpu), mine in zip(workers, dealt, strict=True):
        if gpu is None or not mine:
            continue
        apart = distance(topology.gpus[gpu].place, mine[0].place)
        if apart.far:
            remarks.append(f"GPU {gpu} has no NIC on its own NUMA node: {mine[0].name} is across ({apart.label})")
        elif apart in (Distance.HOST_BRIDGE, Distance.NUMA) and any(
            distance(other.place, nic.place) <= Distance.SWITCHES for other in topology.gpus for nic in nics
        ):
            remarks.append(
                f"GPU {gpu} has no NIC under its own PCIe switch: {mine[0].name} is the nearest ({apart.label})"
            )
    unknown = [nic.name for nic in nics if nic.place.numa is None and nic.place.bus_id is not None]
    if unknown and len(topology.numa_nodes) > 1:
        remarks.append(f"the platform does not say to which NUMA node these NICs belong: {', '.join(unknown)}")
    return remarks


def _all_left(nics: Sequence[Nic], used: set[str], reason: str) -> list[LeftOut]:
    names = dict.fromkeys(nic.name for nic in nics)
    return [LeftOut(nic=name, reason=reason) for name in names if name not in used]


def _anchor(topology: Topology, share: Share, nics: list[Nic]) -> cores.Anchor:
    gpu = NOWHERE if share.gpu is None else topology.gpus[share.gpu].place
    place = nics[0].place if nics and nics[0].place.numa is not None else gpu
    return cores.Anchor(place.numa, place.package)
