"""Two hosts on one machine: network namespaces joined by a veth pair, made for a test and gone with it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sysconfig.get_path("scripts")) / "transfer-engine")
SOON_S = 60.0
_numbers = itertools.count()


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=SOON_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Host:
    """A namespace with one interface to the other host.

    Attributes:
        space: name of the namespace.
        interface: its end of the pair.
        addresses: of that interface.
    """

    space: str
    interface: str
    addresses: list[str] = field(default_factory=list)

    def ip(self, *arguments: str) -> str:
        return ip("-n", self.space, *arguments)

    def give(self, address: str, prefix: int) -> None:
        self.ip("address", "add", f"{address}/{prefix}", "dev", self.interface, *(["nodad"] if ":" in address else []))
        self.addresses.append(address)

    def drop_port(self, port: int, how: str = "blackhole") -> None:
        """What comes in for this TCP port is thrown away without a word, as firewalls do."""
        self.ip("rule", "add", "pref", "1", "lookup", "local")  # behind the new rule instead of before it
        self.ip("rule", "del", "pref", "0")
        self.ip("rule", "add", "pref", "0", "iif", self.interface, "ipproto", "tcp", "dport", str(port), how)

    def reject_port(self, port: int) -> None:
        """The same, but whoever asks is told that it is forbidden."""
        self.run("-c", "cd /proc/sys/net/ipv4; echo 1 >ip_forward; echo 0 >icmp_ratelimit", program="sh")  # it is said
        self.drop_port(port, "prohibit")

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TE_")}
        return {**kept, **more}

    def run(self, *arguments: str, program: str = COMMAND, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", "netns", "exec", self.space, program, *arguments],
            capture_output=True, text=True, timeout=SOON_S, check=False, env=self._environment(environment),
        )  # fmt: skip

    @contextlib.contextmanager
    def started(self, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.space, COMMAND, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment(environment),
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @contextlib.contextmanager
    def serving(self, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """`serve`, and the line to paste on the other host."""
        with self.started("serve", "--transport", "tcp", *arguments, **environment) as process:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line, process.communicate()[1]
            yield process, line


@dataclass
class Wire:
    """Two hosts and the wire between them."""

    one: Host
    other: Host

    def mtu(self, length: int) -> None:
        for host in (self.one, self.other):
            host.ip("link", "set", host.interface, "mtu", str(length))

    def v4(self) -> None:
        self.one.give("10.77.0.1", 24)
        self.other.give("10.77.0.2", 24)

    def v6(self) -> None:
        self.one.give("fd77::1", 64)
        self.other.give("fd77::2", 64)


@pytest.fixture
def wire() -> Iterator[Wire]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.fail("the program ip is missing: tools/setup.sh installs iproute2")
    stem = f"te{os.getpid()}x{next(_numbers)}"
    hosts = [Host(stem + letter, "v" + stem[-12:] + letter) for letter in "ab"]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            ip("netns", "add", host.space)
            stack.callback(ip, "netns", "delete", host.space)
        one, other = hosts
        ip("link", "add", one.interface, "netns", one.space, "type", "veth", "peer", "name", other.interface,
           "netns", other.space)  # fmt: skip
        for host in hosts:
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", host.interface, "up")
        yield Wire(one, other)


def until(condition: Callable[[], Any], within_s: float = SOON_S) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("not in time")
