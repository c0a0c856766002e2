"""Moves bytes between the memories of many machines with one-sided RDMA writes.

`import transfer_engine as te`; start with `te.Engine`. Importing needs no NIC, no GPU, no RDMA library and no torch.
"""

import importlib
from typing import TYPE_CHECKING

from . import errors
from ._version import __version__
from .address import Address
from .counters import Arrival, Counter
from .descriptors import CounterDescriptor, RegionDescriptor, RemoteSlice
from .engine import Engine
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    ConfigError,
    DescriptorError,
    EngineClosed,
    ForkedEngine,
    PeerError,
    PeerLost,
    PeerRestarted,
    PeerUnreachable,
    RangeError,
    RegionClosed,
    RegistrationError,
    RemoteAccessError,
    ResourceExhausted,
    TransferCancelled,
    TransferEngineError,
    TransferTimeout,
    TransportError,
    TransportUnavailable,
)
from .flags import Binding, Flag
from .memory import Buffer, Region, RegionSlice
from .messages import Message, Messages
from .pages import Pages, PageWrite, Scatter, Write
from .peers import Peer
from .prepared import Prepared
from .probing import probe
from .settings import Settings
from .transfers import Transfer, TransferTimes
from .watchers import Trigger, TriggeredTransfers, Watcher

if TYPE_CHECKING:
    from . import kernels, nvlink, rendezvous, topology
    from .groups import PeerGroup
    from .rendezvous import Rendezvous
    from .targets import Target

__all__ = [
    "Address",
    "ArgumentError",
    "ArgumentTypeError",
    "Arrival",
    "Binding",
    "Buffer",
    "ConfigError",
    "Counter",
    "CounterDescriptor",
    "DescriptorError",
    "Engine",
    "EngineClosed",
    "Flag",
    "ForkedEngine",
    "Message",
    "Messages",
    "PageWrite",
    "Pages",
    "Peer",
    "PeerError",
    "PeerGroup",
    "PeerLost",
    "PeerRestarted",
    "PeerUnreachable",
    "Prepared",
    "RangeError",
    "Region",
    "RegionClosed",
    "RegionDescriptor",
    "RegionSlice",
    "RegistrationError",
    "RemoteAccessError",
    "RemoteSlice",
    "Rendezvous",
    "ResourceExhausted",
    "Scatter",
    "Settings",
    "Target",
    "Transfer",
    "TransferCancelled",
    "TransferEngineError",
    "TransferTimeout",
    "TransferTimes",
    "TransportError",
    "TransportUnavailable",
    "Trigger",
    "TriggeredTransfers",
    "Watcher",
    "Write",
    "__version__",
    "errors",
    "kernels",
    "nvlink",
    "probe",
    "rendezvous",
    "topology",
]


_LATE = {"PeerGroup": ".groups", "Rendezvous": ".rendezvous", "Target": ".targets"}


def __getattr__(name: str) -> object:
    """Modules that most programs do not need, or that need numpy, are loaded on first use."""
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name], __name__), name)
    if name in ("kernels", "nvlink", "rendezvous", "topology"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
