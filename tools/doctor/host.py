"""The machine as the doctor looks at it. Tests put another one in its place."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transfer_engine as te
from transfer_engine import topology
from transfer_engine.topology import sysfs

_CHILD_S = 30.0
_INFINITE = resource.RLIM_INFINITY


class ChildFailed(Exception):
    """A look that was taken in a process of its own did not come back; the text says how it ended."""


class ChildTimedOut(ChildFailed):
    """It took too long: nothing is known but that."""


@dataclass
class Host:
    """What is looked at.

    Attributes:
        root: of the file tree; "/" but for tests.
        environment: the variables.
        in_container: the tree looks like a container's.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    _taken: dict[tuple[str, ...], Future[dict[str, Any]]] = field(default_factory=dict)

    @property
    def in_container(self) -> bool:
        """Some sign of a container is there."""
        marks = (".dockerenv", "run/.containerenv")
        known = any((self.root / mark).exists() for mark in marks)
        return known or "KUBERNETES_SERVICE_HOST" in self.environment or "container" in self.environment

    @property
    def is_root(self) -> bool:
        """The process runs as root."""
        return os.geteuid() == 0

    def topology(self) -> topology.Topology:
        """Through hwloc on this machine; of another tree through sysfs."""
        if self.root == Path("/"):
            return topology.discover()
        return sysfs.complete(sysfs.discover(self.root), self.root)

    def path(self, name: str) -> Path:
        """A file by its absolute name."""
        return self.root / name.lstrip("/")

    def limit(self, which: int) -> int | None:
        """A soft resource limit; None: unlimited."""
        soft, _ = resource.getrlimit(which)
        return None if soft == _INFINITE else soft

    def library(self, *names: str) -> tuple[str | None, str]:
        """The first of these libraries that can be loaded, and why none can."""
        reason = "not found"
        for name in names:
            try:
                ctypes.CDLL(name)
            except OSError as cause:
                reason = str(cause)
            else:
                return name, ""
        return None, reason

    def probe(self, transport: str) -> dict[str, str]:
        """What `te.probe` says, from a process of its own.

        Raises:
            TransportUnavailable: as `te.probe` does.
            ChildFailed: the process ended otherwise.
        """
        answer = self.child("probe", transport)
        if "unavailable" in answer:
            raise te.TransportUnavailable(str(answer["unavailable"]), operation="probe")
        return {name: str(value) for name, value in answer.items()}

    def take(self, *looks: tuple[str, ...]) -> None:
        """Takes these looks at once, for `child` to find."""
        with ThreadPoolExecutor(len(looks)) as pool:
            taken = {look: pool.submit(self.child, *look) for look in looks}
        self._taken.update(taken)

    def child(self, *arguments: str) -> dict[str, Any]:
        """Takes a look in a process of its own: foreign libraries may end it, hang it or write to its output.

        Raises:
            ChildTimedOut: it took too long.
            ChildFailed: it ended without an answer.
        """
        if arguments in self._taken:
            return self._taken[arguments].result()
        command = [sys.executable, str(Path(__file__).with_name("child.py")), *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=_CHILD_S, check=False, env=dict(self.environment), text=True,
                errors="replace", stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ChildTimedOut(f"unknown: took longer than {_CHILD_S:g} s") from None
        except OSError as cause:
            raise ChildFailed(f"{sys.executable} cannot be started: {cause.strerror}") from None
        lines = done.stdout.strip().splitlines()
        try:
            answer = json.loads(lines[-1]) if lines else None
        except ValueError:
            answer = None
        if done.returncode != 0 or not isinstance(answer, dict):
            said = done.stderr.strip().splitlines()
            how = f"by signal {-done.returncode}" if done.returncode < 0 else f"with status {done.returncode}"
            raise ChildFailed(f"it ended {how}" + (f": {said[-1][:200]}" if said else ""))
        return answer
