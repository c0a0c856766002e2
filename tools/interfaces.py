"""The network interfaces of this host, as the kernel lists them for this network namespace."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40


@dataclass(frozen=True, slots=True)
class Interface:
    """One of them.

    Attributes:
        name: as `ip link` has it.
        state: "up", "down" or "without a carrier".
        loopback: nobody but this host is behind it.
        addresses: its first IPv4 address and its IPv6 addresses of more than this link.
    """

    name: str
    state: str
    loopback: bool
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        where = ", ".join(self.addresses) or "no IP address"
        return f"{self.name} ({where}{'' if self.state == 'up' else f', {self.state}'})"


def interfaces() -> list[Interface]:
    """All of this host; those that go away meanwhile are left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found.append(_look(control, name))
    return found


def _look(control: socket.socket, name: str) -> Interface:
    flags = struct.unpack_from("H", _ask(control, _SIOCGIFFLAGS, name), 16)[0]
    state = "down" if not flags & _IFF_UP else "up" if flags & _IFF_RUNNING else "without a carrier"
    addresses = []
    with suppress(OSError):
        addresses.append(socket.inet_ntoa(_ask(control, _SIOCGIFADDR, name)[20:24]))
    return Interface(name, state, bool(flags & _IFF_LOOPBACK), (*addresses, *_v6(name)))


def _ask(control: socket.socket, request: int, name: str) -> bytes:
    buffer = array.array("b", struct.pack("256s", name.encode()))
    fcntl.ioctl(control.fileno(), request, buffer, True)
    return buffer.tobytes()


def _v6(name: str) -> list[str]:
    """Of scope host or global: those of one link serve only together with an interface."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, owner = line.split()
            if owner == name and scope in ("00", "10"):
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
