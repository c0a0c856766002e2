"""Memory that the GPUs of one NVLink domain reach directly.

`allocate()` gives memory that can be shared; `map_peers()` maps what every rank of a rendezvous allocated, so that
kernels load from and store to the memory of peers by plain pointers.
"""

from .mapping import Mapped, map_peers
from .memory import DeviceBuffer, PeerMemory, allocate

__all__ = ["DeviceBuffer", "Mapped", "PeerMemory", "allocate", "map_peers"]
