"""What ranks tell each other about their buffers, and how each comes to the others'. Pure, but for `here()`."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .passing import Ticket

_VERSION = 1
_MOST_NAMED = 16


@dataclass(frozen=True, slots=True)
class Host:
    """Where a process runs.

    Attributes:
        name: the host's, for people.
        boot: the same for all processes of one running kernel, containers included.
        network: the network namespace, in which abstract sockets have their names.
    """

    name: str
    boot: str
    network: str


@dataclass(frozen=True, slots=True)
class Card:
    """A rank's buffer. `problem`: why this rank has none to offer; then the rest says nothing."""

    host: Host
    nbytes: int = 0
    length: int = 0
    device: str = ""
    ticket: Ticket | None = None
    fabric: bytes = b""
    problem: str = ""

    def __bytes__(self) -> bytes:
        def plain(value: Any) -> str:
            return base64.b64encode(value).decode()

        return json.dumps({"version": _VERSION, **asdict(self)}, default=plain).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Card:
        """The inverse.

        Raises:
            ValueError: no card, or one of another version.
        """
        try:
            fields = json.loads(data)
            if fields.pop("version") != _VERSION:
                raise ValueError("another version of transfer_engine")
            ticket = fields.pop("ticket")
            if ticket is not None:
                ticket = Ticket(**{name: base64.b64decode(value, validate=True) for name, value in ticket.items()})
            fabric = fields.pop("fabric")
            fabric = base64.b64decode(fabric, validate=True) if fabric else b""
            card = cls(host=Host(**fields.pop("host")), ticket=ticket, fabric=fabric, **fields)
            if not card.problem and not 0 < card.nbytes <= card.length < 1 << 62:
                raise ValueError(f"impossible lengths {card.nbytes} and {card.length}")
        except (KeyError, TypeError, AttributeError) as cause:
            raise ValueError(f"no card: {cause}") from None
        return card


def here() -> Host:
    """This process's."""
    boot = _text("/proc/sys/kernel/random/boot_id")
    return Host(socket.gethostname(), boot or socket.gethostname(), _link("/proc/self/ns/net"))


def ways(cards: Sequence[Card], rank: int) -> dict[int, str]:
    """By rank: "own", "descriptor" or "fabric".

    Raises:
        ConfigError: ranks that cannot be reached; the error names them.
    """
    mine = cards[rank]
    found: dict[int, str] = {}
    apart, walled = [], []
    for other, card in enumerate(cards):
        same_kernel = card.host.boot == mine.host.boot
        if other == rank:
            found[other] = "own"
        elif same_kernel and card.host.network == mine.host.network:
            found[other] = "descriptor"
        elif card.fabric and mine.fabric:
            found[other] = "fabric"
        elif same_kernel:
            walled.append(other)
        else:
            apart.append(other)
    if apart:
        raise ConfigError(
            f"{_ranks(apart, cards)} on other hosts than rank {rank} ({mine.host.name}), without fabric handles",
            operation="map_peers",
            hint="map the ranks of one host only, or set up IMEX: buffer.fabric_refusal says what is missing",
        )
    if walled:
        raise ConfigError(
            f"{_ranks(walled, cards)} on the host of rank {rank}, but in another network namespace",
            operation="map_peers",
            hint="start the ranks of a host in one container, or their containers with one network namespace",
        )
    return found


def _ranks(ranks: list[int], cards: Sequence[Card]) -> str:
    names = [f"{rank} ({cards[rank].host.name})" for rank in ranks[:_MOST_NAMED]]
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}{more} {'are' if len(ranks) > 1 else 'is'}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - it is no path
    except OSError:
        return ""
