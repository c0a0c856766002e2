"""Memory and CPUs: what the system lets this process use."""

from __future__ import annotations

import ctypes
import errno
import os
import resource

from transfer_engine.topology import Topology
from transfer_engine.topology.cpusets import to_list
from transfer_engine.topology.processes import allowed_cpus, cpu_quota
from transfer_engine.topology.sysfs import names_in, read_number, read_text
from transfer_engine.topology.words import count

from ..units import GIB, MIB, size
from .findings import Finding, fine, note, warning
from .host import ChildFailed, Host

_ENOUGH_LOCKED = 1 * GIB
_ENOUGH_SHARED = 1 * GIB
_DOCKERS_SHARED = 64 * MIB


def look(host: Host, topology: Topology, *, rdma: bool) -> list[Finding]:
    """Memory first, then CPUs.

    Args:
        host: what is looked at.
        topology: of this machine.
        rdma: RDMA devices are here, so that locked memory matters.
    """
    return [
        _memlock(host, rdma),
        _hugepages(host),
        _shared_memory(host),
        _cross_memory(host),
        _files(host),
        _cpus(host),
        *_quota(host),
        _numa(topology),
    ]


# --- memory ---------------------------------------------------------------------------------------------------------


def _memlock(host: Host, rdma: bool) -> Finding:
    limit = host.limit(resource.RLIMIT_MEMLOCK)
    if limit is None or (host.is_root and _has_capability(host, 14)):  # CAP_IPC_LOCK
        what = "memory may be locked without limit" if limit is None else "root may lock memory beyond its limit"
        return fine("memory.memlock", what, limit_bytes=limit)
    what = f"at most {size(limit)} of memory may be locked (ulimit -l)"
    if limit >= _ENOUGH_LOCKED:
        return fine("memory.memlock", what, limit_bytes=limit)
    if not rdma:
        return note(
            "memory.memlock", what, "no matter for tcp and shm; RDMA devices could register no more than that",
            limit_bytes=limit,
        )  # fmt: skip
    host_way = "`* - memlock unlimited` in /etc/security/limits.conf and a new login"
    ways = [host_way, "in systemd units LimitMEMLOCK=infinity", "docker run --ulimit memlock=-1"]
    ways.append("in Kubernetes the limit of the container runtime's unit, or the capability IPC_LOCK")
    remedy = "; ".join((*ways[2:], *ways[:2]) if host.in_container else ways)
    return warning(
        "memory.memlock",
        what,
        "RDMA devices cannot register more memory than that: registration fails with ENOMEM",
        f"raise it: {remedy}",
        limit_bytes=limit,
    )


def _has_capability(host: Host, number: int) -> bool:
    for line in (read_text(host.path("/proc/self/status")) or "").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value.strip() or "0", 16) >> number & 1)
    return False


def _hugepages(host: Host) -> Finding:
    sizes = {}
    folder = host.path("/sys/kernel/mm/hugepages")
    for name in names_in(folder):
        kib = name.removeprefix("hugepages-").removesuffix("kB")
        if kib.isdecimal():
            total = read_number(folder / name / "nr_hugepages") or 0
            sizes[size(int(kib) << 10)] = {"total": total, "free": read_number(folder / name / "free_hugepages") or 0}
    mode = read_text(host.path("/sys/kernel/mm/transparent_hugepage/enabled")) or ""
    transparent = mode.partition("[")[2].partition("]")[0] or "unknown"
    facts = {"sizes": sizes, "transparent": transparent}
    in_use = {name: entry for name, entry in sizes.items() if entry["total"]}
    reserved = ", ".join(f"{entry['free']} of {entry['total']} x {name} free" for name, entry in in_use.items())
    if reserved:
        return fine("memory.hugepages", f"huge pages: {reserved}; transparent ones: {transparent}", **facts)
    what = f"no huge pages are reserved; transparent ones: {transparent}"
    if transparent in ("always", "madvise"):
        return fine("memory.hugepages", what, **facts)
    return note(
        "memory.hugepages",
        what,
        "registering many GiB of host memory takes longer, and NICs look up more page addresses",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or reserve some: sysctl vm.nr_hugepages=N",
        **facts,
    )


def _shared_memory(host: Host) -> Finding:
    try:
        found = os.statvfs(host.path("/dev/shm"))
    except OSError as cause:
        return warning(
            "memory.shm",
            f"/dev/shm cannot be used ({cause.strerror})",
            "the shm transport cannot open its files",
            "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm",
        )
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    what = f"/dev/shm has {size(free)} free of {size(total)}"
    if not os.access(host.path("/dev/shm"), os.W_OK):
        return warning("memory.shm", "this user may not write to /dev/shm", "the shm transport cannot open its files",
                       "chmod 1777 /dev/shm", total_bytes=total, free_bytes=free)  # fmt: skip
    if free < _ENOUGH_SHARED:
        cause_text = " (Docker's default)" if total == _DOCKERS_SHARED else ""
        return warning(
            "memory.shm",
            f"{what}{cause_text}",
            "many engines on shm, or data loaders beside them, can run out of it and die by SIGBUS",
            "docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm",
            total_bytes=total,
            free_bytes=free,
        )
    return fine("memory.shm", what, total_bytes=total, free_bytes=free)


def _cross_memory(host: Host) -> Finding:
    """Whether one process may read another's memory, tried out: a child reads from this process."""
    scope = read_number(host.path("/proc/sys/kernel/yama/ptrace_scope"))
    secret = ctypes.create_string_buffer(os.urandom(7))
    try:
        answer = host.child("read_from", f"{os.getpid()}:{ctypes.addressof(secret)}")
    except ChildFailed as cause:
        return note("memory.cross_memory", f"whether processes may read each other's memory is not known: {cause}")
    facts = {"ptrace_scope": scope}
    if answer.get("read") == secret.raw.hex():
        return fine("memory.cross_memory", "processes may read each other's memory (process_vm_readv)", **facts)
    number = int(answer.get("errno", 0))
    name = errno.errorcode.get(number, str(number))
    why = {
        errno.EPERM: f"ptrace_scope is {scope}" if scope else "a seccomp profile or another user's id forbids it",
        errno.ENOSYS: "the kernel, or a sandbox in its place, does not have it",
    }.get(number, "unknown reason")
    return note(
        "memory.cross_memory",
        f"processes may not read each other's memory: process_vm_readv gives {name} ({why})",
        "libfabric's shm copies large writes twice, through shared memory, where it would use this",
        "sysctl kernel.yama.ptrace_scope=0; in containers --cap-add=SYS_PTRACE",
        errno=name,
        **facts,
    )


def _files(host: Host) -> Finding:
    limit = host.limit(resource.RLIMIT_NOFILE)
    if limit is not None and limit < 4096:
        return note(
            "memory.files",
            f"at most {limit} files may be open (ulimit -n)",
            "tcp needs up to two sockets a peer and NIC: some hundred peers are the limit",
            "ulimit -n 65536",
            limit=limit,
        )
    return fine("memory.files", f"{'any number of' if limit is None else limit} files may be open", limit=limit)


# --- CPUs -----------------------------------------------------------------------------------------------------------


def _cpus(host: Host) -> Finding:
    try:
        allowed = allowed_cpus()
    except OSError as cause:
        return note("cpu.allowed", f"which CPUs may be used is not known: {cause.strerror}")
    online = os.cpu_count() or len(allowed)
    what = f"this process may use {len(allowed)} of {online} CPUs ({to_list(allowed)})"
    facts = {"allowed": sorted(allowed), "online": online}
    if len(allowed) == 1:
        return warning(
            "cpu.allowed",
            what,
            "an engine's worker shares the CPU with Python and with its peers: workers sleep when idle, latency rises",
            "allow at least two CPUs for each process (taskset, cpuset, requests of the container)",
            **facts,
        )
    if len(allowed) < 4:
        return note(
            "cpu.allowed",
            what,
            "busy polling takes one CPU an engine: two engines leave nothing for Python",
            'leave polling at "auto" and core unset, so that workers sleep when idle, or allow more CPUs',
            **facts,
        )
    return fine("cpu.allowed", what, **facts)


def _quota(host: Host) -> list[Finding]:
    quota = cpu_quota(host.root)
    if quota is None:
        return []
    what = f"the control group grants {quota:g} CPUs' time"
    if quota >= 4:
        return [fine("cpu.quota", what, cpus=quota)]
    return [
        warning(
            "cpu.quota",
            what,
            "a worker that spins uses it up; then the kernel stops all threads for up to 100 ms at a time",
            "raise the limit, or set TE_POLLING=adaptive",
            cpus=quota,
        )
    ]


def _numa(topology: Topology) -> Finding:
    nodes = topology.numa_nodes
    cores = len(topology.cores)
    smt = max((len(core.cpus) for core in topology.cores), default=1)
    threads = f"{count(cores, 'core')} with {count(smt, 'hardware thread')} each"
    what = f"{count(len(nodes) or 1, 'NUMA node')}, {threads}"
    return fine("cpu.numa", what, nodes=list(nodes), cores=cores, threads_per_core=smt)
