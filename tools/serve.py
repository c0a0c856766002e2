"""The other node: waits for clients, follows one at a time, and goes on to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import transfer_engine as te

from .protocol import ProtocolError
from .results import Exit
from .session import await_client, serve_client
from .wording import told_briefly

Log = Callable[[str], None]


def serve_clients(engine: te.Engine, *, once: bool, log: Log) -> int:
    """Serves until interrupted, or until the first client has left when `once`. Returns the exit status."""
    while True:
        found = await_client(engine, lambda: True)
        assert found is not None
        client, hello = found
        log(f"client {client!r}")
        status = _serve(engine, client, hello, log)
        with contextlib.suppress(te.TransferEngineError):
            engine.disconnect(client, timeout_s=5).wait()
        if once:
            return status


def _serve(engine: te.Engine, client: te.Address, hello: dict[str, object], log: Log) -> int:
    try:
        finished = serve_client(engine, client, hello)
    except (te.TransferEngineError, ProtocolError) as error:
        log(f"client left: {told_briefly(error)}")
        return Exit.BROKEN
    log("client served" if finished else "client refused")
    return Exit.OK if finished else Exit.BROKEN
