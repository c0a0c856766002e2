"""A session between two sides: the one that drives (Session) and the one that follows (serve_client)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transfer_engine as te

from .protocol import VERSION, Channel, ProtocolError, RemoteFailure, decode, failure, result_of
from .side import Side
from .sweep import Case
from .wording import told

_IDLE_S = 120.0  # a client that asks for nothing for so long is given up
_LAST_WORDS_S = 2.0  # how long a failed side waits for the other's view of the failure
_MOST_BYTES = 1 << 32  # that a client may ask for


class Session:
    """The driving end. Made by `open_session`.

    Attributes:
        local: this side.
        greeting: what the other side said of itself: "version", "transport", "nics", "provider", "library".
    """

    def __init__(self, channel: Channel, local: Side, timeout_s: float, greeting: dict[str, Any]) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self.local = local
        self.greeting = greeting

    def together(
        self, outgoing: bool, sender: str, receiver: str, case: Case, rounds: int = 1
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs one step on each side at the same time.

        Args:
            outgoing: True when this side sends.
            sender: the step of the side that sends.
            receiver: the step of the side that receives.
            case: for both.
            rounds: for both.

        Returns:
            What the sender's and the receiver's step returned.

        Raises:
            RemoteFailure: the other side's step failed.
            TransferEngineError: this side's step failed, and the other side knows no better reason.
        """
        mine, theirs = (sender, receiver) if outgoing else (receiver, sender)
        self._channel.send({"do": theirs, "case": case.to_dict(), "rounds": rounds}, timeout_s=self._timeout_s)
        try:
            result = self.local.step(mine)(case, rounds)
        except te.TransferEngineError:
            self._raise_better_reason()
            raise
        # Its own waits are bounded by the same time-out; the rest is for what it does between them.
        answer = result_of(self._channel.receive(timeout_s=2 * self._timeout_s))
        return (result, answer) if outgoing else (answer, result)

    def _raise_better_reason(self) -> None:
        try:
            result_of(self._channel.receive(timeout_s=_LAST_WORDS_S))
        except RemoteFailure:
            raise
        except (te.TransferEngineError, ProtocolError):
            return


@contextmanager
def open_session(
    engine: te.Engine,
    address: te.Address,
    *,
    source_bytes: int,
    target_bytes: int,
    timeout_s: float,
    flip: str | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[Session]:
    """Connects to a side that serves, and agrees on memory and counters. Says goodbye at the end."""
    channel = Channel(engine, address, check)
    local = Side(channel, source_bytes=source_bytes, target_bytes=target_bytes, timeout_s=timeout_s)
    hello = {
        "hello": VERSION,
        "source_bytes": source_bytes,
        "target_bytes": target_bytes,
        "timeout_s": timeout_s,
        "flip": flip,
        "offer": local.offer(),
    }
    channel.send(hello, timeout_s=timeout_s)
    greeting = result_of(channel.receive(timeout_s=timeout_s))
    local.accept(greeting["offer"])
    try:
        yield Session(channel, local, timeout_s, greeting)
    except BaseException:
        _ignoring_errors(lambda: channel.send({"bye": True}, timeout_s=0.5))
        raise
    channel.send({"bye": True}, timeout_s=timeout_s)
    result_of(channel.receive(timeout_s=timeout_s))
    local.close()


def await_client(engine: te.Engine, keep_waiting: Callable[[], bool]) -> tuple[te.Address, dict[str, Any]] | None:
    """The next client and its greeting; None once nobody waits any more. What is no greeting is dropped."""
    while keep_waiting():
        try:
            message = engine.receive(0.25)
        except te.TransferTimeout:
            continue
        try:
            document = decode(message.data)
        except ProtocolError:
            continue  # the rest of a session that was broken off
        if "hello" in document:
            return message.sender, document
    return None


def serve_client(engine: te.Engine, client: te.Address, hello: dict[str, Any]) -> bool:
    """Follows one client until it says goodbye. Returns False when it left in another way.

    Raises:
        TransferEngineError: the client was lost, or fell silent.
    """
    channel = Channel(engine, client)
    try:
        if hello["hello"] != VERSION:
            raise ValueError(f"protocol {hello['hello']} is not {VERSION}: install the same version on both sides")
        source_bytes, target_bytes = int(hello["source_bytes"]), int(hello["target_bytes"])
        if not all(0 < length <= _MOST_BYTES for length in (source_bytes, target_bytes)):
            raise ValueError(f"buffers of {source_bytes} and {target_bytes} bytes")
        timeout_s = min(max(float(hello["timeout_s"]), 0.1), 3600.0)
        flip = None if hello.get("flip") is None else str(hello["flip"])
        side = Side(channel, source_bytes=source_bytes, target_bytes=target_bytes, timeout_s=timeout_s, flip=flip)
        side.accept(hello["offer"])
    except (KeyError, TypeError, ValueError, te.TransferEngineError) as error:
        channel.send(failure(type(error).__name__, told(error)), timeout_s=5)
        return False
    channel.send({"done": {**describe(engine), "offer": side.offer()}}, timeout_s=timeout_s)
    try:
        return _follow(channel, side, timeout_s)
    finally:
        _ignoring_errors(side.close)


def _follow(channel: Channel, side: Side, timeout_s: float) -> bool:
    while True:
        request = channel.receive(timeout_s=_IDLE_S)
        if "bye" in request:
            channel.send({"done": {}}, timeout_s=timeout_s)
            return True
        try:
            step, case = side.step(request["do"]), Case.from_dict(request["case"])
            side.ensure_fits(case)
            answer = {"done": step(case, int(request["rounds"]))}
        except (te.TransferEngineError, KeyError, TypeError, ValueError, MemoryError) as error:
            channel.send(failure(type(error).__name__, told(error)), timeout_s=timeout_s)
            continue
        channel.send(answer, timeout_s=timeout_s)


def describe(engine: te.Engine) -> dict[str, Any]:
    """What a side says of itself."""
    chosen = engine.describe()
    return {
        "version": te.__version__,
        "transport": engine.transport,
        "provider": chosen["provider"],
        "library": chosen["library"],
        "nics": list(engine.nics),
    }


def _ignoring_errors(action: Callable[[], object]) -> None:
    try:
        action()
    except te.TransferEngineError:
        return
