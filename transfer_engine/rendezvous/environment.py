"""What the launcher says in the environment: torchrun's variables, and our own.

Where the store is, when none is given:

1. TE_RENDEZVOUS="HOST:PORT": exactly there; rank 0 serves it.
2. MASTER_ADDR and MASTER_PORT, as torchrun sets them. torchrun's own store listens on MASTER_PORT, so ours takes the
   first free one of the eight ports behind it (MASTER_PORT + 1 to + 8; before it, where the numbers end). Clients try
   these eight and know their store by the job's name, so jobs with neighbouring ports do not mix.
3. A world of one process needs neither.

torch is not imported for any of this. Whoever wants torch's store passes it: Rendezvous(store=...).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError

ADDRESS = "TE_RENDEZVOUS"
_CANDIDATES = 8
_MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks meet: one host, and the ports at which its store may listen, in this order."""

    host: str
    ports: tuple[int, ...]


def number_from(name: str, environment: Mapping[str, str]) -> int | None:
    """A variable's number, or None when it is not set.

    Raises:
        ConfigError: it is set to something else.
    """
    text = environment.get(name, "")
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"environment variable {name}: {text!r} is no number of zero or more", operation="Rendezvous")
    return number


def ranks(rank: int | None, world_size: int | None, environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """The rank and the number of ranks: the arguments, else RANK and WORLD_SIZE.

    Raises:
        ConfigError: not known, or the two do not fit.
    """
    environment = os.environ if environment is None else environment
    rank = number_from("RANK", environment) if rank is None else rank
    world_size = number_from("WORLD_SIZE", environment) if world_size is None else world_size
    if rank is None or world_size is None:
        missing = "rank" if rank is None else "world_size"
        raise ConfigError(
            f"{missing} is neither given nor in the environment ({'RANK' if rank is None else 'WORLD_SIZE'})",
            operation="Rendezvous",
            hint="start the processes with torchrun, or pass rank= and world_size=",
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}: it must be at least 0 and below", operation="Rendezvous")
    return rank, world_size


def meeting(world_size: int, environment: Mapping[str, str] | None = None) -> Meeting:
    """Where the ranks meet; see the module's rules.

    Raises:
        ConfigError: the environment does not say, or says something impossible.
    """
    environment = os.environ if environment is None else environment
    if environment.get(ADDRESS):
        host, port = parse_address(environment[ADDRESS], f"environment variable {ADDRESS}")
        return Meeting(host, (port,))
    host, master = environment.get("MASTER_ADDR", ""), number_from("MASTER_PORT", environment)
    if host and master is not None:
        if not 0 < master <= _MOST_PORT:
            raise ConfigError(f"environment variable MASTER_PORT: {master} is no port", operation="Rendezvous")
        behind = master + _CANDIDATES <= _MOST_PORT
        ports = (
            range(master + 1, master + 1 + _CANDIDATES) if behind else range(master - 1, master - 1 - _CANDIDATES, -1)
        )
        return Meeting(host.strip("[]"), tuple(ports))
    if world_size == 1:
        return Meeting("127.0.0.1", (0,))
    raise ConfigError(
        f"no store is given, and neither {ADDRESS} nor MASTER_ADDR and MASTER_PORT are in the environment",
        operation="Rendezvous",
        hint=f"start the processes with torchrun, set {ADDRESS}=HOST:PORT of rank 0, or pass store=",
    )


def job_name(environment: Mapping[str, str] | None = None) -> str:
    """The same for all ranks of a job, another one for any other job and after an elastic restart."""
    environment = os.environ if environment is None else environment
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", ADDRESS)
    return "/".join(environment.get(name, "") for name in names)


def parse_address(text: str, what: str) -> tuple[str, int]:
    """As in "HOST:PORT"; an IPv6 address stands in brackets.

    Raises:
        ConfigError: something else; `what` names it.
    """
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    if not bare or (":" in bare and bare == host) or not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
        raise ConfigError(f"{what}: {text!r} is not HOST:PORT, with IPv6 addresses in brackets", operation="Rendezvous")
    return bare, int(port)


def address_text(host: str, port: int) -> str:
    """The inverse."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel notice within half a minute that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def errno_name(number: int | None) -> str | None:
    """As in "ECONNREFUSED"; None when there is none."""
    return errno.errorcode.get(number) if number else None


def is_literal(host: str) -> bool:
    """A numeric address or "localhost": it means the same on every host, so a server may listen there alone."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
