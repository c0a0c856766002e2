"""Who can be reached: names that other nodes may use for this one, and why an address does not answer."""

from __future__ import annotations

import errno
import ipaddress
import socket

import transfer_engine as te

from .interfaces import interfaces

_PATIENCE_S = (
    3.5  # for a plain TCP connection: three attempts of the kernel, since refusals by ICMP are limited in rate
)


def advertised(host: str) -> str:
    """The IP address by which other nodes reach this one, from a name or an address of it.

    Raises:
        ConfigError: it cannot be resolved, leads every node to itself, or is not of this host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as cause:
        raise te.ConfigError(
            f"{host!r} cannot be resolved: {cause.strerror or cause}",
            operation="--host",
            hint="give an IP address of this host, or leave --host out and name an interface with --nics",
        ) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    usable = [
        address
        for address in addresses
        if not _is_loopback(address) and not ipaddress.ip_address(address.partition("%")[0]).is_link_local
    ]
    for address in usable:
        if _is_ours(address):
            return address
    if usable:
        raise te.ConfigError(
            f"{usable[0]}: cannot bind to this address: it is not one of this host's",
            operation="--host",
            hint=f"this host has {_ours() or 'no address that others could reach'}",
        )
    raise te.ConfigError(
        f"{host!r} resolves to {', '.join(addresses)}: there every node finds itself, not this one",
        operation="--host",
        hint="correct /etc/hosts or DNS, or give an IP address of this host that other nodes reach",
    )


def only_here(address: te.Address) -> bool:
    """True when no other node can reach this address."""
    return address.transport == "tcp" and any(_is_loopback(_split(nic)[0]) for nic in address.nics)


def one_way(mine: te.Address, theirs: te.Address, *, chosen: bool) -> str | None:
    """Why the other side could never answer this one, known before anything is sent; None if it could.

    Args:
        mine: address of this side's engine.
        theirs: that of the other side.
        chosen: this side's NICs were named, and not found by the engine.
    """
    if mine.transport != "tcp" or not all(_is_loopback(_split(nic)[0]) for nic in mine.nics):
        return None
    if _is_here(theirs):
        return None
    if chosen:
        return (
            f"this side uses {mine.nics[0]}, a loopback address, so the other cannot answer. Choose another NIC "
            f"(--nics NAME, or TE_NICS): {_ours() or 'this host has no other that is up'}"
        )
    others = [str(interface) for interface in interfaces() if not interface.loopback]
    what = f"there are {', '.join(others)}" if others else "there is no other at all"
    return (
        f"this host cannot reach {theirs.nics[0]}, nor be answered: no network interface of it is up and has an "
        f"address but the loopback; {what}. Bring one up (`ip link set NAME up`), or check this container's network"
    )


def why_silent(mine: te.Address, theirs: te.Address, *, met: bool = False) -> str | None:
    """What a plain TCP connection to an address that did not answer tells; None where that says nothing.

    Args:
        mine: address of this side's engine.
        theirs: that of the other side.
        met: the two sides had talked before.
    """
    if theirs.transport != "tcp":
        return None
    if only_here(theirs) and not only_here(mine) and not met:
        return (
            f"{theirs.nics[0]} is a loopback address: it leads to this very host. On the serving host choose another "
            "NIC (serve --nics NAME, or --host ADDRESS)"
        )
    if only_here(mine) and not met and not _is_here(theirs):
        return (
            f"this side uses {mine.nics[0]}, a loopback address, among others, so the other cannot answer. Choose "
            "other NICs (--nics NAME, or TE_NICS); `transfer-engine doctor` lists the interfaces"
        )
    reason = next((reason for reason in map(_knock, theirs.nics) if reason is not None), None)
    if reason is not None:
        return reason
    if met:
        return (
            f"{theirs.nics[0]} still accepts plain TCP connections, so the host and the network are up now: the other "
            "side was held up, has given this side up, or the network failed for a while. Its output says more"
        )
    return (
        f"something listens at {theirs.nics[0]}, but not the engine of this address: it may be of an earlier run "
        "(paste the line that `transfer-engine serve` printed last), or --timeout is too short for connecting"
    )


def _knock(nic: str) -> str | None:
    """Why a plain connection to a NIC fails; None if it does not."""
    host, port = _split(nic)
    try:
        socket.create_connection((host, port), timeout=_PATIENCE_S).close()
    except ConnectionRefusedError:
        return (
            f"{nic} refuses connections: nothing listens there, or a firewall rejects them in its name. Is "
            "`transfer-engine serve` still running? Each start has an address of its own. If it is, open the ports "
            "that TE_PORTS=LOW-HIGH fixes there"
        )
    except TimeoutError:
        return (
            f"{nic} does not answer a plain TCP connection: the host is down, or a firewall drops the packets. Open "
            "the ports that TE_PORTS=LOW-HIGH fixes on the serving host"
        )
    except OSError as cause:
        return f"{nic} {_not_there(host, port, cause)}"
    return None


def _not_there(host: str, port: int, cause: OSError) -> str:
    """The local routes are asked first: what they allow has been refused by somebody on the way."""
    reason = cause.strerror or str(cause)
    if cause.errno in (errno.EINVAL, errno.EACCES, errno.EPERM) or not _is_routed(host, port):
        forbidding = {errno.EINVAL: "blackhole route", errno.EACCES: "prohibit route", errno.EPERM: "firewall"}
        if cause.errno in forbidding:
            what = forbidding[cause.errno]
            return f"cannot be reached: a {what} of this host forbids it ({reason}): see `ip route get {host}`"
        return f"cannot be reached: this host has no route there ({reason}): see `ip route get {host}`"
    if cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return (
            f"cannot be reached ({reason}), although this host has a route there: the other host is not up, or a "
            "firewall that rejects, or a router, answers in its place. Open the ports that TE_PORTS=LOW-HIGH fixes"
        )
    return f"cannot be reached: {reason}"


def _is_routed(host: str, port: int) -> bool:
    """Whether this host would send a packet there: nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
    except OSError:
        return False
    return True


def _is_here(address: te.Address) -> bool:
    return any(_is_loopback(host) or _is_ours(host) for host, _ in map(_split, address.nics))


def _is_ours(host: str) -> bool:
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


def _ours() -> str:
    """The interfaces that others could reach, in words."""
    return ", ".join(str(interface) for interface in interfaces() if not interface.loopback and interface.addresses)


def _split(nic: str) -> tuple[str, int]:
    host, _, port = nic.rpartition(":")
    return host.strip("[]"), int(port)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
