"""CUDA's driver, GPUs, and what lets NICs and the CPU reach their memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transfer_engine.topology import Topology
from transfer_engine.topology.sysfs import read_text
from transfer_engine.topology.words import count

from .findings import Finding, fine, note, warning
from .host import ChildFailed, ChildTimedOut, Host


def look(host: Host, topology: Topology) -> list[Finding]:
    """Nothing but one note on a machine without GPUs."""
    try:
        cuda: Mapping[str, Any] = host.child("cuda")
    except ChildTimedOut as cause:
        cost = "whether GPU memory can be used is not known"
        return [note("gpu.driver", f"CUDA's driver: {cause}", cost, "look again when the machine is less busy")]
    except ChildFailed as cause:
        cuda = {"failed": f"CUDA's driver fails: {cause}", "devices": []}
    present = len(topology.gpus)
    if "missing" in cuda and not present:
        return [note("gpu.driver", "no GPU and no CUDA driver is here", "only host memory can be moved")]
    findings = [_driver(host, cuda, present)]
    devices = cuda.get("devices", [])
    findings += _devices(host, topology, devices)
    if devices:
        findings += [_peer_memory(host, devices), _gdrcopy(host), *_fabric_handles(devices)]
    return findings


def _driver(host: Host, cuda: Mapping[str, Any], present: int) -> Finding:
    if "missing" in cuda:
        return warning(
            "gpu.driver",
            f"{count(present, 'GPU')} in the machine, but CUDA's driver cannot be loaded ({cuda['missing']})",
            "GPU memory cannot be used",
            "start the container with the NVIDIA runtime (--gpus all)"
            if host.in_container
            else "install NVIDIA's driver",
        )
    kernel = (read_text(host.path("/proc/driver/nvidia/version")) or "").partition("\n")[0]
    facts = {"cuda": cuda.get("version"), "kernel_module": kernel or None}
    if "failed" in cuda:
        return warning(
            "gpu.driver",
            f"CUDA's driver is here, but does not start: {cuda['failed']}",
            "GPU memory cannot be used",
            "compare the versions of libcuda and the kernel module (`nvidia-smi`); restart after an update",
            **facts,
        )
    return fine("gpu.driver", f"CUDA driver {cuda.get('version')}", **facts)


def _devices(host: Host, topology: Topology, devices: list[dict[str, Any]]) -> list[Finding]:
    names = sorted({device["name"] for device in devices})
    findings = []
    if devices:
        what = f"{count(len(devices), 'GPU')}: {', '.join(names)}"
        findings.append(fine("gpu.devices", what, devices=devices))
    hidden = [gpu for gpu in topology.gpus if gpu.unusable]
    visible = host.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden:
        reasons = "; ".join(f"GPU {gpu.index}: {gpu.unusable}" for gpu in hidden[:4])
        findings.append(
            note(
                "gpu.hidden",
                f"{len(hidden)} of the machine's {len(topology.gpus)} GPUs cannot be used here ({reasons})",
                "their NICs are dealt out to the other GPUs",
            )
        )
    elif visible is not None and len(devices) < len(topology.gpus):
        findings.append(
            note("gpu.hidden", f"CUDA_VISIBLE_DEVICES={visible} shows {len(devices)} of {len(topology.gpus)} GPUs")
        )
    return findings


def _peer_memory(host: Host, devices: list[dict[str, Any]]) -> Finding:
    """How NICs get at GPU memory: dma-buf in the open driver and recent kernels, nvidia_peermem before."""
    module = host.path("/sys/module/nvidia_peermem").exists()
    dma_buf = all(device.get("dma_buf") == 1 for device in devices)
    facts = {"dma_buf": dma_buf, "nvidia_peermem": module}
    if dma_buf or module:
        ways = [name for name, there in (("dma-buf", dma_buf), ("nvidia_peermem", module)) if there]
        return fine("gpu.peer_memory", f"NICs can reach GPU memory through {' and '.join(ways)}", **facts)
    return warning(
        "gpu.peer_memory",
        "neither dma-buf nor nvidia_peermem is here",
        "NICs cannot reach GPU memory: data takes a detour through host memory",
        "use NVIDIA's open kernel modules (dma-buf), or `modprobe nvidia_peermem`",
        **facts,
    )


def _gdrcopy(host: Host) -> Finding:
    node = host.path("/dev/gdrdrv")
    library, reason = host.library("libgdrapi.so.2", "libgdrapi.so")
    cost = 'flags and watchers are of kind "mapped", in host memory: a GPU sees a change about a microsecond later'
    if library is None:
        remedy = "install libgdrapi (gdrcopy) and load gdrdrv" if not node.exists() else "install libgdrapi (gdrcopy)"
        return note("gpu.gdrcopy", f"libgdrapi cannot be loaded ({reason})", cost, remedy)
    if not node.exists():
        where = "pass /dev/gdrdrv into the container" if host.in_container else "load it: `modprobe gdrdrv`"
        return note("gpu.gdrcopy", "libgdrapi is here, /dev/gdrdrv is not", cost, where, library=library)
    if not os.access(node, os.R_OK | os.W_OK):
        return note("gpu.gdrcopy", "this user may not open /dev/gdrdrv", cost, "chmod 666 /dev/gdrdrv", library=library)
    return fine("gpu.gdrcopy", f"GDRCopy is here ({library}, /dev/gdrdrv)", library=library)


def _fabric_handles(devices: list[dict[str, Any]]) -> list[Finding]:
    if not any(device.get("fabric_handles") for device in devices):
        return []
    what = "the GPUs know fabric handles; whether they may be made depends on IMEX (/dev/nvidia-caps-imex-channels)"
    return [note("gpu.fabric_handles", what)]
