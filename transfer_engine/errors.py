"""What can go wrong, sorted by what the caller can do about it.

Every error carries `operation`, `peer`, `nic`, `status`, `elapsed_s` and `hint`; `str(error)` shows all that are known.
Errors pickle, so they cross process boundaries whole.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ConfigError",
    "DescriptorError",
    "EngineClosed",
    "ForkedEngine",
    "PeerError",
    "PeerLost",
    "PeerRestarted",
    "PeerUnreachable",
    "RangeError",
    "RegionClosed",
    "RegistrationError",
    "RemoteAccessError",
    "ResourceExhausted",
    "TransferCancelled",
    "TransferEngineError",
    "TransferTimeout",
    "TransportError",
    "TransportUnavailable",
]


def _rebuild(cls: type[TransferEngineError], message: str, attributes: dict[str, Any]) -> TransferEngineError:
    return cls(message, **attributes)


class TransferEngineError(Exception):
    """The root of the tree.

    Attributes:
        message: what happened and where, with the values.
        operation: the call that failed ("write", "register", ...), or None.
        peer: text form of the peer's address, or None when no peer is involved.
        nic: name of the local NIC, or None when none is involved.
        status: the provider's status by name ("ETIMEDOUT"), else the core's ("peer lost"), or None.
        elapsed_s: seconds from submission to failure, or None when nothing was submitted.
        hint: what to do about it.
    """

    default_hint: ClassVar[str] = "see the documentation on troubleshooting"

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        peer: str | None = None,
        nic: str | None = None,
        status: str | None = None,
        elapsed_s: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.peer = peer
        self.nic = nic
        self.status = status
        self.elapsed_s = elapsed_s
        self.hint = hint or self.default_hint

    def __str__(self) -> str:
        head = f"{self.operation}: {self.message}" if self.operation else self.message
        details = []
        if self.peer:
            details.append(f"peer {shortened(self.peer)}")
        if self.nic:
            details.append(f"nic {self.nic}")
        if self.status:
            details.append(f"status {self.status}")
        if self.elapsed_s is not None:
            details.append(f"after {self.elapsed_s:.6g} s")
        tail = f" [{', '.join(details)}]" if details else ""
        return f"{head}{tail}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = {
            "operation": self.operation,
            "peer": self.peer,
            "nic": self.nic,
            "status": self.status,
            "elapsed_s": self.elapsed_s,
            "hint": self.hint,
        }
        return _rebuild, (type(self), self.message, attributes)


def refuse_callback(function: object, operation: str) -> None:
    """Raises ArgumentTypeError unless it can be called: afterwards nobody would be there to hear of it."""
    if not callable(function):
        raise ArgumentTypeError(f"the callback must be callable, not {type(function).__name__}", operation=operation)


def refuse_pickle(value: object, instead: str) -> NoReturn:
    """For `__reduce__` of what is bound to its process."""
    raise ArgumentTypeError(
        f"a te.{type(value).__name__} is of use in its own process only and cannot be pickled or copied",
        operation="pickle",
        hint=instead,
    )


def shortened(text: str, most: int = 80) -> str:
    """At most that many characters.

    Addresses of engines with many NICs are long: both ends tell them apart, and `peer` holds all of it.
    """
    return text if len(text) <= most else f"{text[: most - 12]}...{text[-9:]}"


class ConfigError(TransferEngineError):
    """A setting that cannot be honoured here."""

    default_hint = "correct what is named above; te.Settings.table() and docs/operations.md list settings and variables"


class TransportUnavailable(TransferEngineError):
    """The library, provider or device of the requested transport is missing."""

    default_hint = (
        "`transfer-engine doctor` says what is missing; without a transport te.Engine takes the best that works"
    )


class RegistrationError(TransferEngineError):
    """Memory that cannot be registered, or not for this use."""

    default_hint = "register contiguous, writable host memory, or use engine.allocate()"


class PeerError(TransferEngineError):
    """Something is wrong with the peer; other peers are not affected."""

    default_hint = "check that the peer runs, and exchange addresses again"


class PeerUnreachable(PeerError):
    """The peer never answered while connecting."""

    default_hint = "check that the peer's process runs with the same transport and that no firewall is in between"


class PeerLost(PeerError):
    """The peer fell silent or its process ended: all work towards it has failed."""

    default_hint = "disconnect() the peer; connect again once it is back with a new address"


class PeerRestarted(PeerError):
    """The peer was started anew: addresses and descriptors of its former life are void."""

    default_hint = "obtain the peer's new address, descriptors and counters"


class RemoteAccessError(TransferEngineError):
    """The peer refused access to its memory."""

    default_hint = "obtain the region's descriptor again from its owner"


class RegionClosed(RemoteAccessError):
    """The region was closed by its owner, here or at the peer."""

    default_hint = "its owner closed it; make another (register(), counter()) and exchange the new descriptor"


class TransferTimeout(TransferEngineError, TimeoutError):
    """A deadline passed. Whether bytes can still land is told by `transfer.quiesced`, where there is a transfer."""

    default_hint = "raise timeout_s, or look at engine.stats() for the peer that is slow"


class TransferCancelled(TransferEngineError):
    """The transfer was cancelled by this side."""

    default_hint = "wait_quiesced() tells when the memory may be reused"


class TransportError(TransferEngineError):
    """The NIC or its provider reported a failure."""

    default_hint = "engine.stats() shows the NIC's errors; `transfer-engine doctor` checks the transport"


class EngineClosed(TransferEngineError):
    """The engine was closed, or the counter, flag, watcher, group, target or prepared transfer in question."""

    default_hint = "open a new te.Engine; keep it open until its transfers have ended"


class ForkedEngine(TransferEngineError):
    """The engine belongs to the parent of this process and cannot be used here."""

    default_hint = "open an engine in the child, or start workers with the 'spawn' or 'forkserver' method"


class ArgumentError(TransferEngineError, ValueError):
    """A value that can never work."""

    default_hint = "correct the argument named above"


class ArgumentTypeError(TransferEngineError, TypeError):
    """An argument of the wrong type."""

    default_hint = "pass an argument of the type named above"


class RangeError(TransferEngineError, IndexError):
    """An offset, length or page index outside its region."""

    default_hint = "offsets count bytes from the region's start; nothing is clamped and nothing wraps around"


class DescriptorError(ArgumentError):
    """Bytes that are no valid address or descriptor: foreign, truncated or damaged."""

    default_hint = "pass on bytes(x) unchanged; both sides need compatible versions of transfer_engine"


class ResourceExhausted(TransferEngineError):
    """A fixed table is full: operations, regions, counters or peers."""

    default_hint = "wait for transfers and close what is not needed, or raise the limit in te.Settings"
