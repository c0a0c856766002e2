"""How the two sides talk: small JSON documents over a channel, one request and one answer at a time.

The channel is made of the engine's own messages. They come in order, so payload messages of a test simply stand between
a request and its answer: no framing tells them apart, and a message out of order is found at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import transfer_engine as te

VERSION = 1
_SLICE_S = 0.25  # how often a waiting side looks whether the other still lives
_FATAL_STATES = ("lost", "closed")


class ProtocolError(Exception):
    """The other side said something that has no place here."""


class RemoteFailure(Exception):
    """A step failed on the other side.

    Attributes:
        kind: the class of the error there ("PeerLost", ...).
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"on the other side: {kind}: {text}")
        self.kind = kind


class Channel:
    """Documents to and from one peer.

    Args:
        engine: receives; nobody else may call its `receive` meanwhile.
        peer: messages of others are answered with "busy" and dropped.
        check: called while waiting; raises when the other side is known to be gone.
    """

    def __init__(self, engine: te.Engine, peer: te.Address, check: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self.peer = peer
        self._check = check
        self._peer = engine.connect(peer)

    def send(self, document: dict[str, Any], *, timeout_s: float) -> None:
        """Returns when the peer's NIC has it."""
        self.engine.send(self.peer, encode(document), timeout_s=timeout_s).wait()

    def receive(self, *, timeout_s: float) -> dict[str, Any]:
        """The next document.

        Raises:
            ProtocolError: something else came.
            TransferTimeout, PeerLost: nothing came.
        """
        return decode(self.receive_bytes(timeout_s=timeout_s))

    def receive_bytes(self, *, timeout_s: float) -> bytes:
        """The next message, whatever it holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = self.engine.receive(max(0.0, min(_SLICE_S, deadline - time.monotonic())))
            except te.TransferTimeout:
                self.ensure_alive()
                if time.monotonic() >= deadline:
                    raise te.TransferTimeout(
                        f"the other side said nothing for {timeout_s:g} s",
                        operation="receive",
                        peer=str(self.peer),
                        hint="look at the other process; --timeout raises the limit",
                    ) from None
                continue
            if message.sender == self.peer:
                return message.data
            turn_away(self.engine, message.sender)

    def ensure_alive(self) -> None:
        """Raises what is known about the other side's end.

        Raises:
            PeerLost: it is gone.
        """
        if self._check is not None:
            self._check()
        if self._peer.state in _FATAL_STATES:
            raise te.PeerLost(f"the other side is {self._peer.state}", operation="receive", peer=str(self.peer))


def turn_away(engine: te.Engine, sender: te.Address) -> None:
    """Tells a peer that another one is being served. What becomes of the answer is that peer's affair."""
    engine.send(sender, encode(failure("Busy", "another client is being served; try again later")), timeout_s=1)


def failure(kind: str, text: str) -> dict[str, Any]:
    """The answer to a request that failed."""
    return {"failed": {"kind": kind, "text": text}}


def result_of(answer: dict[str, Any]) -> Any:
    """What a step returned.

    Raises:
        RemoteFailure: it failed there.
        ProtocolError: not an answer.
    """
    if "done" in answer:
        return answer["done"]
    reason = answer.get("failed")
    if isinstance(reason, dict):
        raise RemoteFailure(str(reason.get("kind", "Error")), str(reason.get("text", "no reason given")))
    raise ProtocolError(f"expected an answer, got {str(answer)[:80]}")


def encode(document: dict[str, Any]) -> bytes:
    """As bytes of a message."""
    return json.dumps(document, separators=(",", ":")).encode()


def decode(data: bytes) -> dict[str, Any]:
    """The inverse.

    Raises:
        ProtocolError: not a document.
    """
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ProtocolError(f"expected a control message, got {len(data)} bytes: {data[:24].hex(' ')}")
    return document
