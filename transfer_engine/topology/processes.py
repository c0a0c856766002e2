"""The processes of one node: how many there are, which one this is, and which GPU each serves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .cpusets import from_list
from .model import Gpu
from .sysfs import read_text

LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """Which of its node's processes this one is; `known` when the launcher said so (torchrun's variables)."""

    rank: int = 0
    count: int = 1
    known: bool = False


def local_process(environment: Mapping[str, str] | None = None) -> LocalProcess:
    """From LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them.

    Raises:
        ConfigError: one without the other, or values that do not fit.
    """
    environment = os.environ if environment is None else environment
    texts = [environment.get(name, "") for name in (LOCAL_RANK, LOCAL_WORLD_SIZE)]
    if not any(texts):
        return LocalProcess()
    try:
        rank, count = map(int, texts)
    except ValueError:
        rank, count = -1, 0
    if not 0 <= rank < count:
        raise ConfigError(
            f"environment variables {LOCAL_RANK}={texts[0]!r} and {LOCAL_WORLD_SIZE}={texts[1]!r}: both are needed, "
            "with 0 <= rank < size",
            operation="topology",
        )
    return LocalProcess(rank, count, known=True)


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str] | None = None) -> tuple[int, ...]:
    """The usable GPUs as CUDA numbers them in this process: entry i is the index of cuda:i.

    CUDA_VISIBLE_DEVICES may hold numbers or the beginnings of UUIDs; as in CUDA, all from the first unknown one on are
    not there. CUDA numbers by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; for equal GPUs both orders are the same.
    """
    environment = os.environ if environment is None else environment
    usable = [gpu for gpu in gpus if gpu.unusable is None]
    if _VISIBLE not in environment:
        return tuple(gpu.index for gpu in usable)
    result: list[int] = []
    for entry in environment[_VISIBLE].split(","):
        name = entry.strip()
        matches = [gpu.index for gpu in usable if gpu.uuid and name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if name.isdecimal() and int(name) < len(usable):
            matches = [usable[int(name)].index]
        if len(matches) != 1 or matches[0] in result:
            break
        result += matches
    return tuple(result)


def serving(usable: Sequence[int], visible: Sequence[int], process: LocalProcess) -> list[tuple[int, int | None]]:
    """Which process serves which GPU: (local rank, index of the GPU), one entry a worker.

    One process alone serves all GPUs that it sees; of several, process r serves cuda:r. Where each process was given
    one GPU of its own (CUDA_VISIBLE_DEVICES), only the own one is known: then every GPU has a worker, and those of
    the others bear the numbers that are left.

    Args:
        usable: the indices of all usable GPUs of the machine.
        visible: of `visible_gpus`.
        process: this process.
    """
    if not visible:
        return [(rank, None) for rank in range(process.count)]
    if process.count == 1:
        return [(0, gpu) for gpu in visible]
    if len(visible) == 1 and len(usable) >= process.count:
        others = [gpu for gpu in usable if gpu != visible[0]]
        ranks = [rank for rank in range(len(usable)) if rank != process.rank]
        return sorted([(process.rank, visible[0]), *zip(ranks, others, strict=True)])
    return [(rank, visible[rank % len(visible)]) for rank in range(process.count)]


def allowed_cpus() -> frozenset[int]:
    """The CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def mask_is_own(root: Path = Path("/")) -> bool:
    """The launcher bound this process to CPUs of its own: its parent may use more than it."""
    fields = (root / "proc" / name / "status" for name in ("self", str(os.getppid())))
    mine, parents = (_mask(read_text(path) or "") for path in fields)
    return bool(mine) and mine < parents


def _mask(status: str) -> frozenset[int]:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return from_list(value)
    return frozenset()


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many CPUs' time the control group grants, or None: no limit, or none that can be read."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            quota = _unified(root / "sys/fs/cgroup", path)
        elif "cpu" in controllers.split(","):
            quota = _legacy(root / "sys/fs/cgroup", controllers, path)
        else:
            continue
        if quota is not None:
            return quota
    return None


def _unified(mount: Path, path: str) -> float | None:
    """Version 2: the tightest limit from the process's group up; a container may see its own group as the root."""
    limits = []
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        limit, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
        if limit.isdecimal() and period.isdecimal() and int(period):
            limits.append(int(limit) / int(period))
        if folder == mount:
            break
    return min(limits, default=None)


def _legacy(mount: Path, controllers: str, path: str) -> float | None:
    for folder in (mount / controllers / path.lstrip("/"), mount / "cpu" / path.lstrip("/"), mount / "cpu"):
        limit, period = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if limit is not None and period is not None:
            return int(limit) / int(period) if limit.isdecimal() and period.isdecimal() and int(period) else None
    return None
