"""Moves bytes between the memories of many machines with one-sided RDMA writes.

`import transfer_engine as te`; start with `te.Engine`. Importing needs no NIC, no GPU, no RDMA library and no torch.
"""

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
from .memory import Buffer, Region, RegionSlice
from .messages import Message, Messages
from .pages import Pages, PageWrite, Write
from .peers import Peer
from .probing import probe
from .settings import Settings
from .transfers import Transfer

__all__ = [
    "Address",
    "ArgumentError",
    "ArgumentTypeError",
    "Arrival",
    "Buffer",
    "ConfigError",
    "Counter",
    "CounterDescriptor",
    "DescriptorError",
    "Engine",
    "EngineClosed",
    "ForkedEngine",
    "Message",
    "Messages",
    "PageWrite",
    "Pages",
    "Peer",
    "PeerError",
    "PeerLost",
    "PeerRestarted",
    "PeerUnreachable",
    "RangeError",
    "Region",
    "RegionClosed",
    "RegionDescriptor",
    "RegionSlice",
    "RegistrationError",
    "RemoteAccessError",
    "RemoteSlice",
    "ResourceExhausted",
    "Settings",
    "Transfer",
    "TransferCancelled",
    "TransferEngineError",
    "TransferTimeout",
    "TransportError",
    "TransportUnavailable",
    "Write",
    "__version__",
    "errors",
    "probe",
]
