"""Faults of the network between the RDMA devices of the guest, and what the devices count.

Device rxe0 sits on roce0, whose other end port0 is a port of a bridge. A fault of the port meets all that comes to the
device from others; what a device sends to itself does not go there.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOON_S = 60.0
DEVICES = Path("/sys/class/infiniband")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def port_of(device: str) -> str:
    return "port" + device.removeprefix("rxe")


def is_active(device: str) -> bool:
    return (DEVICES / device / "ports/1/state").read_text() == "4: ACTIVE\n"


def is_connected(device: str) -> bool:
    """Active, with its port forwarding: the one may come up a second before the other."""
    return is_active(device) and Path(f"/sys/class/net/{port_of(device)}/brport/state").read_text() == "3\n"


def counters(device: str) -> dict[str, int]:
    """What the device has counted: duplicate_request, out_of_seq_request, retry_exceeded_err, ..."""
    return {path.name: int(path.read_text()) for path in (DEVICES / device / "ports/1/hw_counters").iterdir()}


def gids(device: str) -> list[str]:
    """Global identifiers in use, as the kernel writes them."""
    found = [path.read_text().strip() for path in sorted((DEVICES / device / "ports/1/gids").iterdir())[:8]]
    return [gid for gid in found if gid.strip("0:")]


@dataclass(frozen=True)
class Queue:
    """The queue of a port."""

    port: str

    def show(self) -> dict[str, Any]:
        (root,) = (queue for queue in json.loads(run("tc", "-j", "-s", "qdisc", "show", "dev", self.port)))
        return dict(root)

    @property
    def kind(self) -> str:
        return str(self.show()["kind"])

    @property
    def dropped(self) -> int:
        return int(self.show()["drops"])


@contextlib.contextmanager
def netem(device: str, fault: str) -> Iterator[Queue]:
    """Loses, delays, reorders or duplicates what comes to a device: netem("rxe1", "loss 5%"), as tc-netem(8) has it."""
    port = port_of(device)
    run("tc", "qdisc", "add", "dev", port, "root", "netem", *fault.split())
    try:
        yield Queue(port)
    finally:
        run("tc", "qdisc", "del", "dev", port, "root")


@contextlib.contextmanager
def link_down(device: str) -> Iterator[None]:
    """Pulls the cable of a device: nothing comes to it or leaves it, and its port is down."""
    run("ip", "link", "set", port_of(device), "down")
    try:
        until(lambda: not is_active(device), f"{device} is down")
        yield
    finally:
        run("ip", "link", "set", port_of(device), "up")
        until(lambda: is_connected(device), f"{device} is up")


def until(condition: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {name}"
        time.sleep(0.02)
