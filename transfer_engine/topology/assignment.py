"""One process's part of its node's plan, and the settings that follow from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..errors import ArgumentError, ConfigError
from ..settings import Settings
from . import processes
from .discovery import discover
from .model import Topology
from .policy import MOST_NICS, LeftOut, Plan, Share, plan
from .processes import LocalProcess

_PINNING = ("efa", "cx7", "tcp", "shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one process of a node uses.

    Attributes:
        shares: one for each GPU that the process serves; a single one without GPU where there is none.
        plan: of the whole node.
    """

    shares: tuple[Share, ...]
    plan: Plan

    @property
    def nics(self) -> tuple[str, ...]:
        """Of all shares together, for an engine of host memory; at most as many as one engine takes."""
        return tuple(dict.fromkeys(name for share in self.shares for name in share.nics))[:MOST_NICS]

    @property
    def core(self) -> int | None:
        """The CPU for the worker of the first share; None: do not pin."""
        return self.shares[0].core if self.shares else None

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """NICs that no process of the node uses, with the reasons."""
        return self.plan.left_out

    @property
    def messages(self) -> tuple[str, ...]:
        """What there is to say about the plan."""
        return self.plan.messages

    def for_gpu(self, gpu: int) -> Share:
        """The share beside one GPU, by its index in the topology.

        Raises:
            ArgumentError: this process does not serve it.
        """
        for share in self.shares:
            if share.gpu == gpu:
                return share
        served = ", ".join(str(share.gpu) for share in self.shares if share.gpu is not None) or "none"
        raise ArgumentError(f"GPU {gpu} is not among those that this process serves ({served})", operation="topology")


def assign(
    topology: Topology,
    local_rank: int,
    local_world_size: int,
    settings: Settings | None = None,
    *,
    gpus: tuple[int, ...] | None = None,
    allowed: frozenset[int] | None = None,
    quota: float | None = None,
    own_cpus: bool = False,
) -> Assignment:
    """The part of one process. Pure.

    Args:
        topology: of the node.
        local_rank: of the process, from 0.
        local_world_size: how many processes the node runs.
        settings: wishes, as in `plan`.
        gpus: the index of cuda:0, cuda:1, ... in this process; None: all usable GPUs.
        allowed: CPUs that this process and those beside it may use; None: all.
        quota: how many CPUs' time is granted; None: no limit.
        own_cpus: those CPUs are this process's alone.

    Raises:
        ArgumentError: no such rank or GPU.
    """
    if not 0 <= local_rank < local_world_size:
        raise ArgumentError(f"local rank {local_rank} of {local_world_size} processes", operation="topology")
    usable = [gpu.index for gpu in topology.gpus if gpu.unusable is None]
    visible = tuple(usable) if gpus is None else gpus
    if not set(visible) <= set(usable):
        raise ArgumentError(f"GPUs {visible} are not all among the usable ones ({usable})", operation="topology")
    workers = processes.serving(usable, visible, LocalProcess(local_rank, local_world_size, known=True))
    cores_for = local_rank if own_cpus else None
    whole = plan(topology, workers, settings, allowed=allowed, quota=quota, cores_for=cores_for)
    return Assignment(shares=whole.of(local_rank), plan=whole)


def place(settings: Settings, *, gpu: int | None = None) -> tuple[Settings, Assignment | None]:
    """Fills in the NICs and the core that this machine's topology gives; what is set already stays.

    NICs are chosen for transports that have any. A core is given away only where the launcher said how many processes
    the node runs (LOCAL_WORLD_SIZE): otherwise two processes that know nothing of each other would take the same one.

    Args:
        settings: with a transport.
        gpu: the number of the CUDA device as this process counts; None: host memory.

    Returns:
        The settings, and the assignment when one was made.

    Raises:
        ConfigError: the launcher's variables contradict each other, or there is no such GPU.
    """
    process = processes.local_process()
    core_open = settings.core == "auto" and process.known and settings.transport in _PINNING
    nics_open = settings.nics is None and settings.transport in ("efa", "cx7")
    if not core_open and not nics_open:
        return settings, None
    topology = discover()
    visible = processes.visible_gpus(topology.gpus)
    if gpu is not None and not 0 <= gpu < len(visible):
        raise ConfigError(f"cuda:{gpu}: this process sees {len(visible)} GPUs", operation="topology")
    assignment = assign(
        topology,
        process.rank,
        process.count,
        settings,
        gpus=visible,
        allowed=processes.allowed_cpus(),
        quota=processes.cpu_quota(),
        own_cpus=processes.mask_is_own(),
    )
    share = None if gpu is None else assignment.for_gpu(visible[gpu])
    nics = share.nics if share else assignment.nics
    core = share.core if share else assignment.core
    if nics_open and nics:
        settings = dataclasses.replace(settings, nics=nics)
    if core_open and core is not None:
        settings = dataclasses.replace(settings, core=core)
    return settings, assignment
