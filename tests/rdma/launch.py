"""Guests beside the test, for the tests that run on the host."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

GUEST = Path(__file__).parent / "guest"
PATIENCE_S = 280  # less than a test has

# Settings of engines on an emulated processor: memory that is touched costs it dearly, and it is late at times.
SLOW_ENGINES = {
    "TE_MAX_PEERS": "16", "TE_IMMEDIATE_WINDOW": "64", "TE_NIC_DEPTH": "128", "TE_OPERATIONS": "1024",
    "TE_MAX_REGIONS": "4096", "TE_CORE": "none", "TE_ACK_TIMEOUT": "17", "TE_PEER_TIMEOUT_S": "20",
    "TE_CONNECT_TIMEOUT_S": "30",
}  # fmt: skip


@contextlib.contextmanager
def guest(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running guest; it is gone in the end. Arguments are those of the launcher, then `--` and the command."""
    process = subprocess.Popen(
        [sys.executable, str(GUEST), "--timeout", str(PATIENCE_S), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.terminate()


class Wire:
    """Two guests of one device each on a wire: nodes 0 and 1, with the addresses 10.77.0.1 and 10.77.1.1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, node: int, command: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """A shell command on a node."""
        size = ("--devices", "1", "--cpus", "1", "--memory", "1536")
        return guest("--wire", str(self.folder), "--node", str(node), *size, "--", "sh", "-c", command)
