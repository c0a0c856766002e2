"""The second process of a test on one machine: started by the first, and never outliving it.

It prints one line of JSON on its standard output, {"address": "te1:..."} or {"error": ...}, and then follows the first
process over the engine's messages. Its standard input is a pipe that nobody writes to: the end of the first process, of
whatever kind, closes it, and that ends this one. Where this one is stopped, the kernel's parent-death signal does so.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import transfer_engine as te

from .session import await_client, serve_client
from .wording import told

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_FAREWELL_S = 1.0  # for the second process to end by itself

# The first process's search path, so that both run the same code, whatever the working directory holds.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from transfer_engine.tools import second; second.main()"
)


class SecondProcessError(Exception):
    """The second process cannot start, or has ended.

    Attributes:
        unavailable: the transport does not work there.
    """

    def __init__(self, message: str, *, unavailable: bool = False) -> None:
        super().__init__(message)
        self.unavailable = unavailable


class SecondProcess:
    """The second process as the first one sees it."""

    def __init__(self, process: subprocess.Popen[bytes], address: te.Address) -> None:
        self._process = process
        self.address = address

    def check(self) -> None:
        """Raises SecondProcessError when it has ended."""
        status = self._process.poll()
        if status is not None:
            raise SecondProcessError(f"the second process (pid {self._process.pid}) {_ending(status)}")

    def check_soon(self) -> None:
        """The same, after giving an end that is under way the time to become known."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        self.check()


@contextlib.contextmanager
def second_process(transport: str, nics: int | str | None, *, timeout_s: float) -> Iterator[SecondProcess]:
    """Starts the second process and waits for its address; ends it whatever happens.

    Raises:
        SecondProcessError: it did not come up.
    """
    path = json.dumps(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, path, json.dumps({"transport": transport, "nics": nics})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield SecondProcess(process, _read_address(process, timeout_s))
    finally:
        _end(process)


def _read_address(process: subprocess.Popen[bytes], timeout_s: float) -> te.Address:
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise SecondProcessError(f"the second process did not come up within {timeout_s:g} s")
        if select.select([process.stdout], [], [], left)[0]:
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                raise SecondProcessError(f"the second process {_ending(process.wait(_FAREWELL_S))} before it was ready")
            line += part
    document = json.loads(line)
    if "error" in document:
        raise SecondProcessError(f"in the second process: {document['error']}", unavailable=document["unavailable"])
    return te.Address.from_text(document["address"])


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()  # ends it, in the normal case as in all others
    try:
        process.wait(_FAREWELL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        process.stdout.close()


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


# --- inside the second process ----------------------------------------------------------------------------------------


def main() -> None:
    """The second process. Ctrl-C is the first one's business: it closes our standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    options = json.loads(sys.argv[2])
    parent_lives = threading.Event()
    parent_lives.set()
    threading.Thread(target=_watch_parent, args=(parent_lives,), name="watch-parent", daemon=True).start()
    try:
        engine = te.Engine(options["transport"], nics=options["nics"])
    except te.TransferEngineError as error:
        _print({"error": told(error), "unavailable": isinstance(error, te.TransportUnavailable)})
        sys.exit(1)
    with contextlib.suppress(te.TransferEngineError), engine:  # the first process tells the story
        _print({"address": str(engine.address)})
        found = await_client(engine, parent_lives.is_set)
        if found is not None:
            serve_client(engine, *found)


def _watch_parent(lives: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    lives.clear()
    # Standing in a call or waiting for a peer that is gone must not keep this process alive.
    time.sleep(_FAREWELL_S / 2)
    os._exit(0)


def _print(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
