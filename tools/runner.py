"""What the measuring commands have in common: engines, the other side, and every error turned into an exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import transfer_engine as te

from . import reach, session
from .protocol import ProtocolError, RemoteFailure
from .results import Exit, TransportResult
from .second import SecondProcess, SecondProcessError, second_process
from .session import Session
from .wording import told

_SILENCE = (te.PeerUnreachable, te.PeerLost, te.TransferTimeout)  # a look at the network says more
_CLOSE_S = 1.0  # how long an engine may take to say goodbye when something went wrong
_BETWEEN_PROCESSES = ("efa", "cx7", "tcp", "shm")
DEFAULT_TRANSPORTS = ("tcp", "shm")  # those of any machine


@dataclass(frozen=True, slots=True)
class Options:
    """What all measuring commands take."""

    address: te.Address | None
    transports: tuple[str, ...]
    nics: int | str | None
    timeout_s: float
    flip: str | None = None


def chosen_transports(asked: tuple[str, ...], address: te.Address | None) -> tuple[str, ...]:
    """Those asked for, else the address's, else the environment's, else those of any machine.

    Raises:
        ConfigError: the address is of another transport, or a transport does not leave the process.
    """
    chosen = _chosen(asked, address)
    for transport in chosen:
        refuse_one_process(transport)
    return chosen


def refuse_one_process(transport: str | None) -> None:
    """Raises ConfigError for the simulated fabric, and for what is no transport."""
    if transport and transport not in (*_BETWEEN_PROCESSES, "sim"):
        raise te.ConfigError(
            f"transport {transport!r} is not allowed: one of {', '.join(_BETWEEN_PROCESSES)}", operation="--transport",
            hint="leave --transport out (or unset TE_TRANSPORT), or give one of these",
        )  # fmt: skip
    if transport == "sim":
        raise te.ConfigError(
            "sim is a simulated fabric inside one process: two processes cannot talk over it",
            operation="--transport",
            hint=f"choose one of {', '.join(_BETWEEN_PROCESSES)}",
        )


def _chosen(asked: tuple[str, ...], address: te.Address | None) -> tuple[str, ...]:
    if address is not None:
        if asked not in ((), (address.transport,)):
            raise te.ConfigError(
                f"the address is of transport {address.transport}, not {', '.join(asked)}",
                operation="--transport",
                hint="leave --transport out: the address decides",
            )
        return (address.transport,)
    if asked:
        return tuple(dict.fromkeys(asked))
    return (os.environ["TE_TRANSPORT"],) if os.environ.get("TE_TRANSPORT") else DEFAULT_TRANSPORTS


def run_transport(
    options: Options, transport: str, buffers: tuple[int, int], work: Callable[[Session, TransportResult], None]
) -> TransportResult:
    """Opens a session on one transport and does `work` in it. Whatever goes wrong is told by the result."""
    result = TransportResult(transport)
    second: SecondProcess | None = None
    mine: te.Address | None = None
    try:
        with contextlib.ExitStack() as stack:
            engine = te.Engine(transport, nics=options.nics, settings=_settings())
            stack.callback(_close, engine)
            result.local = session.describe(engine)
            mine = engine.address
            blocked = _blocked(options, mine)
            if blocked is not None:
                result.status = Exit.BROKEN
                result.error = {"kind": te.PeerUnreachable.__name__, "message": blocked}
                return result
            if options.address is None:
                second = stack.enter_context(
                    second_process(transport, options.nics, timeout_s=min(options.timeout_s, 30.0))
                )
                stack.callback(_close, engine)  # before the other process goes: a goodbye is quicker than a loss
            with _opened(engine, options, second, buffers) as opened:
                result.remote = {name: value for name, value in opened.greeting.items() if name != "offer"}
                work(opened, result)
    except KeyboardInterrupt:
        result.status = Exit.INTERRUPTED
        result.error = {"kind": "KeyboardInterrupt", "message": "interrupted"}
    except SecondProcessError as error:
        result.status = Exit.UNAVAILABLE if error.unavailable else Exit.BROKEN
        _explain(result, error, str(error))
    except te.TransferEngineError as error:
        result.status = _status_of(error)
        why = None
        if options.address is not None and mine is not None and isinstance(error, _SILENCE):
            why = reach.why_silent(mine, options.address, met=bool(result.remote))
        _explain(result, error, told(error) if why is None else f"{told(error)}\n  why: {why}")
    except (RemoteFailure, ProtocolError) as error:
        result.status = Exit.BROKEN
        _explain(result, error, str(error))
    return result


@contextlib.contextmanager
def _opened(
    engine: te.Engine, options: Options, second: SecondProcess | None, buffers: tuple[int, int]
) -> Iterator[Session]:
    address = options.address if second is None else second.address
    assert address is not None
    try:
        with session.open_session(
            engine,
            address,
            source_bytes=buffers[0],
            target_bytes=buffers[1],
            timeout_s=options.timeout_s,
            flip=options.flip,
            check=None if second is None else second.check,
        ) as opened:
            yield opened
    except (te.TransferEngineError, RemoteFailure):
        if second is not None:
            second.check_soon()  # its end explains all else
        raise


def _blocked(options: Options, mine: te.Address) -> str | None:
    """Why the other node could never answer, if that is so."""
    if options.address is None or options.address.transport != "tcp":
        return None
    return reach.one_way(mine, options.address, chosen=isinstance(options.nics, str) or bool(os.environ.get("TE_NICS")))


def _settings() -> te.Settings:
    settings = te.Settings()
    return dataclasses.replace(settings, close_timeout_s=min(settings.close_timeout_s, _CLOSE_S))


def _close(engine: te.Engine) -> None:
    with contextlib.suppress(te.TransferTimeout):  # the other side may be gone; the engine is closed all the same
        engine.close(_CLOSE_S)


def _status_of(error: te.TransferEngineError) -> int:
    if isinstance(error, te.TransportUnavailable):
        return Exit.UNAVAILABLE
    return Exit.USAGE if isinstance(error, (te.ConfigError, te.ArgumentError, te.ArgumentTypeError)) else Exit.BROKEN


def _explain(result: TransportResult, error: Exception, message: str) -> None:
    result.error = {"kind": type(error).__name__, "message": message}
