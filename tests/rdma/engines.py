"""Pairs of engines over the devices of the guest, by the means of the conformance suite.

The near side takes its NICs from the first devices, the far side from the last: with two each, rxe0 is connected to
rxe3 and rxe1 to rxe2. Nothing that they exchange stays inside a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..conformance.rig import TRANSPORTS, Case, Child, Rig

CONTROL, OTHER = ("rxe0", "rxe3"), ("rxe1", "rxe2")  # NICs 0 and 1: near, far

# An emulated processor is late at times: an acknowledgement is waited for 0.54 s, a silent peer for long. The kernel's
# rdma_rxe takes a retry count of 7 for "without end"; other devices give up after seven.
PATIENT = {"ack_timeout": 17, "retry_count": 6, "peer_timeout_s": 10.0}
GIVEN_UP_S = 7 * 0.54


@contextlib.contextmanager
def pair(nics: int, far_nics: int | None = None, *, apart: bool = False, **changes: Any) -> Iterator[Rig]:
    """A rig of two engines, which open on first use; `changes` are settings of both."""
    case = Case(TRANSPORTS["rxe"], nics, far_nics or nics, apart, changes=tuple({**PATIENT, **changes}.items()))
    shared: list[Child] = []
    with contextlib.ExitStack() as children:

        def spawn() -> Child:
            child = Child()
            children.callback(child.close)
            return child

        def share() -> Child:
            if not shared:
                shared.append(spawn())
            return shared[0]

        rig = Rig(case, spawn, share)
        try:
            yield rig
        finally:
            rig.close()
