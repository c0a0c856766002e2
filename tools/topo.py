"""`transfer-engine topo`: which NICs and cores belong to which GPU, and what each process of the node would use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import transfer_engine as te
from transfer_engine import topology
from transfer_engine.topology import Nic, Plan, RdmaPort, Topology
from transfer_engine.topology.cpusets import to_list
from transfer_engine.topology.identify import product_of
from transfer_engine.topology.processes import allowed_cpus, cpu_quota, local_process
from transfer_engine.topology.words import count

from . import report
from .interfaces import interfaces

_JSON = """\b
The document that --json prints:
{"schema": "transfer-engine/topo/1", "version",
 "topology": {"source", "cores": [{"index", "cpus", "numa", "package"}],
   "gpus": [{"index", "model", "uuid", "place", "unusable"}],
   "nics": [{"name", "model", "rdma", "interfaces", "rate_gbps", "pcie_gbps", "place", "unusable"}],
   "allowed", "notes"},
   with "place": {"bus_id", "path", "numa", "package"}
 "processes": how many the plan is for,
 "plan": {"shares": [{"local_rank", "gpu", "nics", "distances", "core"}],
          "left_out": [{"nic", "reason"}], "messages"},
 "rdma_ports": [{"name", "device", "port", "state", "link_layer", "lid", "interface",
                 "gid_index", "gid", "gid_kind", "why", "unusable", "remedy"}],
   of this machine: none with --xml,
 "distances": [for each GPU, for each NIC: "PIX" | "PXB" | "PHB" | "NODE" | "PKG" | "SYS" | "?"]}
"""


@click.command(epilog=_JSON)
@click.option(
    "--processes", type=click.IntRange(1, 1024),
    help="Plan for so many processes on the node.  [default: $LOCAL_WORLD_SIZE, else one a GPU]",
)  # fmt: skip
@click.option(
    "--transport", type=click.Choice(("efa", "cx7", "tcp")), help="Whose NICs.  [default: those for RDMA, else all]"
)
@click.option(
    "--xml", "recorded", type=click.Path(path_type=Path), metavar="FILE",
    help="A machine that `lstopo --of xml FILE` recorded, in place of this one.",
)  # fmt: skip
@click.option("--matrix", is_flag=True, help="Show the distance of every NIC from every GPU, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text for people.")
def topo(processes: int | None, transport: str | None, recorded: Path | None, matrix: bool, as_json: bool) -> int:
    """Show which NICs and cores belong to which GPU.

    And so what each process of this node would use, and which GID each RDMA port sends from with transport cx7.
    Distances are named as `nvidia-smi topo -m` names them: PIX below one PCIe switch, PXB below several, PHB through
    the host bridge, NODE within a NUMA node, PKG within a processor package, SYS across packages, ? unknown.
    """
    machine = topology.recorded(recorded) if recorded else topology.discover()
    usable = tuple(gpu.index for gpu in machine.gpus if gpu.unusable is None)
    process = local_process()
    processes = processes or (process.count if process.known else max(1, len(usable)))
    settings = te.Settings(transport=transport) if transport else te.Settings()
    found = topology.assign(
        machine,
        0,
        processes,
        settings,
        gpus=usable,
        allowed=None if recorded else allowed_cpus(),
        quota=None if recorded else cpu_quota(),
    ).plan
    ports = topology.rdma_ports(gid_index=settings.gid_index, pkey_index=settings.pkey_index) if not recorded else ()
    if as_json:
        click.echo(json.dumps(_document(machine, found, processes, ports), indent=2))
    else:
        out = report.console()
        _show(out, machine, found, processes, matrix=matrix)
        if ports:
            out.print(_port_table(ports))
        for text in _absent(machine, transport, matrix=matrix):
            click.echo(f"note: {text}")
    return 0


def _absent(machine: Topology, transport: str | None, *, matrix: bool) -> list[str]:
    """What was asked for and is not here."""
    kind = {"efa": "EFA", "cx7": "ConnectX"}.get(transport or "")
    texts = []
    if kind and not any(nic.for_rdma and nic.model.startswith("1d0f:") == (transport == "efa") for nic in machine.nics):
        texts.append(f"--transport {transport}: no {kind} device is here, so no NIC can be planned for it")
    if not machine.nics and not kind:
        texts.append(f"no NIC hangs on a bus that can be seen.{_virtual()}")
    if matrix and not (machine.gpus and machine.nics):
        missing = " and no ".join(name for name, here in (("GPU", machine.gpus), ("NIC", machine.nics)) if not here)
        texts.append(f"--matrix: no {missing} is here, so there are no distances to show")
    return texts


def _virtual() -> str:
    """What tcp uses without a NIC in the tree: the interfaces of containers and virtual machines."""
    others = [interface.name for interface in interfaces() if not interface.loopback]
    return f" Network interfaces that are virtual serve tcp all the same: {', '.join(others)}" if others else ""


def _document(machine: Topology, found: Plan, processes: int, ports: Sequence[RdmaPort]) -> dict[str, Any]:
    return {
        "schema": "transfer-engine/topo/1",
        "version": te.__version__,
        "topology": machine.to_dict(),
        "processes": processes,
        "plan": found.to_dict(),
        "rdma_ports": [port.to_dict() for port in ports],
        "distances": [[_label(machine, gpu, nic) for nic in machine.nics] for gpu in range(len(machine.gpus))],
    }


def _label(machine: Topology, gpu: int, nic: Nic) -> str:
    return topology.distance(machine.gpus[gpu].place, nic.place).label


def _show(out: Console, machine: Topology, found: Plan, processes: int, *, matrix: bool) -> None:
    usable = sum(gpu.unusable is None for gpu in machine.gpus)
    parts = (
        count(len(machine.cores), "core"),
        count(len(machine.cpus), "hardware thread"),
        count(len(machine.numa_nodes) or 1, "NUMA node"),
        count(len(machine.gpus), "GPU") + (f" ({usable} usable)" if usable < len(machine.gpus) else ""),
        count(len(machine.nics), "NIC"),
    )
    out.print(f"[bold]{escape(machine.source)}[/]: {', '.join(parts)}", soft_wrap=True)
    for node in machine.numa_nodes:
        cpus = to_list(cpu for core in machine.cores if core.numa == node for cpu in core.cpus)
        out.print(f"  NUMA node {node}: CPUs {cpus}", soft_wrap=True)
    out.print(_plan_table(machine, found, processes))
    if machine.nics:
        out.print(_nic_table(machine, found))
    if matrix and machine.gpus and machine.nics:
        out.print(_matrix(machine))
    for text in (*machine.notes, *found.messages):
        out.print(f"[yellow]note[/] {escape(text)}", soft_wrap=True)


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)


def _plan_table(machine: Topology, found: Plan, processes: int) -> Table:
    table = _table("plan for one process" if processes == 1 else f"plan for {processes} processes")
    for name in ("process", "GPU", "NUMA", "core", "NICs"):
        right = name in ("process", "NUMA", "core")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "NICs")
    for share in found.shares:
        gpu = None if share.gpu is None else machine.gpus[share.gpu]
        nics = (f"{name} {one.label}" if gpu else name for name, one in zip(share.nics, share.distances, strict=True))
        table.add_row(
            str(share.local_rank),
            f"{gpu.index} {escape(gpu.model)}" if gpu else "host",
            _number(gpu.place.numa) if gpu else "",
            "not pinned" if share.core is None else str(share.core),
            ", ".join(nics) or "none",
        )
    for gpu in machine.gpus:
        if gpu.unusable:
            table.add_row("", f"{gpu.index} {escape(gpu.model)}", _number(gpu.place.numa), "", escape(gpu.unusable))
    return table


def _nic_table(machine: Topology, found: Plan) -> Table:
    table = _table("NICs")
    for name in ("NIC", "model", "link", "NUMA", "bus", "used by"):
        table.add_column(name, justify="right" if name in ("link", "NUMA") else "left", no_wrap=name != "used by")
    users: dict[str, list[str]] = {}
    for share in found.shares:
        user = f"process {share.local_rank}" + ("" if share.gpu is None else f"/GPU {share.gpu}")
        for name in share.nics:
            users.setdefault(name, []).append(user)
    reasons = {entry.nic: entry.reason for entry in found.left_out}
    for nic in machine.nics:
        names = dict.fromkeys((nic.name, *nic.interfaces))
        using = [user for name in names for user in users.get(name, ())]
        reason = next((reasons[name] for name in names if name in reasons), "nobody")
        product = product_of(nic.model)
        table.add_row(
            nic.name,
            f"{product} ({nic.model})" if product else nic.model,
            _link(nic),
            _number(nic.place.numa),
            nic.place.bus_id or "-",
            escape(", ".join(using)) if using else f"[yellow]not used:[/] {escape(reason)}",
        )
    return table


def _port_table(ports: Sequence[RdmaPort]) -> Table:
    table = _table("RDMA ports: what transport cx7 sends from")
    for name in ("port", "state", "link", "interface", "GID", "why, or why not"):
        table.add_column(name, no_wrap=name != "why, or why not")
    for port in ports:
        gid = "-" if port.gid_index is None else f"{port.gid_index}: {port.gid}"
        lid = f" LID {port.lid}" if port.lid else ""
        link = f"{port.link_layer}{lid}" or "-"
        reason = escape(f"{port.unusable}; {port.remedy}" if port.remedy else port.unusable or "")
        why = f"[yellow]not used:[/] {reason}" if reason else escape(port.why)
        table.add_row(escape(port.name), escape(port.state), escape(link), escape(port.interface or "-"), gid, why)
    return table


def _matrix(machine: Topology) -> Table:
    table = _table("distances")
    table.add_column("", no_wrap=True)
    for gpu in machine.gpus:
        table.add_column(f"GPU {gpu.index}", no_wrap=True)
    for nic in machine.nics:
        table.add_row(nic.name, *(_label(machine, gpu.index, nic) for gpu in machine.gpus))
    return table


def _link(nic: Nic) -> str:
    if nic.rate_gbps:
        return f"{nic.rate_gbps:g} Gb/s"
    return f"PCIe {nic.pcie_gbps:g} Gb/s" if nic.pcie_gbps else "-"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)
