"""Who can be reached: names that other nodes may use for this one, and why an address does not answer."""

from __future__ import annotations

import errno
import ipaddress
import socket

import transfer_engine as te

_PATIENCE_S = 2.0  # for a plain TCP connection


def advertised(host: str) -> str:
    """The IP address by which other nodes reach this one, from a name or an address of it.

    Raises:
        ConfigError: it cannot be resolved, or leads every node to itself.
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
    for address in addresses:
        if not _is_loopback(address) and not ipaddress.ip_address(address.partition("%")[0]).is_link_local:
            return address
    raise te.ConfigError(
        f"{host!r} resolves to {', '.join(addresses)}: there every node finds itself, not this one",
        operation="--host",
        hint="correct /etc/hosts or DNS, or give an IP address of this host that other nodes reach",
    )


def only_here(address: te.Address) -> bool:
    """True when no other node can reach this address."""
    return address.transport == "tcp" and any(_is_loopback(_split(nic)[0]) for nic in address.nics)


def why_silent(mine: te.Address, theirs: te.Address) -> str | None:
    """What a plain TCP connection to an address that did not answer tells; None where that says nothing."""
    if theirs.transport != "tcp":
        return None
    if only_here(theirs) and not only_here(mine):
        return (
            f"{theirs.nics[0]} is a loopback address: it leads to this very host. On the serving host choose another "
            "NIC (serve --nics NAME, or --host ADDRESS)"
        )
    if only_here(mine) and not only_here(theirs):
        return (
            f"this side uses {mine.nics[0]}, a loopback address, so the other cannot answer. Choose another NIC "
            "(--nics NAME, or TE_NICS); `transfer-engine doctor` lists the interfaces"
        )
    return next((reason for reason in map(_knock, theirs.nics) if reason is not None), None) or (
        f"something listens at {theirs.nics[0]}, but not the engine of this address: it may be of an earlier run. "
        "Paste the line that `transfer-engine serve` printed last"
    )


def _knock(nic: str) -> str | None:
    """Why a plain connection to a NIC fails; None if it does not."""
    host, port = _split(nic)
    try:
        socket.create_connection((host, port), timeout=_PATIENCE_S).close()
    except ConnectionRefusedError:
        return (
            f"{nic} refuses connections: nothing listens there. Is `transfer-engine serve` still running? Each start "
            "has an address of its own"
        )
    except TimeoutError:
        return (
            f"{nic} does not answer a plain TCP connection: the host is down, or a firewall drops the packets. Open "
            "the ports that TE_PORTS=LOW-HIGH fixes on the serving host, in both directions"
        )
    except OSError as cause:
        if cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return f"{nic}: this host has no route there, or the host is not up ({cause.strerror})"
        return f"{nic} cannot be reached: {cause.strerror or cause}"
    return None


def _split(nic: str) -> tuple[str, int]:
    host, _, port = nic.rpartition(":")
    return host.strip("[]"), int(port)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
