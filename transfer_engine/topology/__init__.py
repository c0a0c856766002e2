"""Which NICs and cores belong to which GPU, and which of them each process of a node uses.

`discover()` looks at this machine (through hwloc where it is installed, else through sysfs), `recorded(path)` at a
file that `lstopo` wrote. `plan()` deals out a whole node, `assign()` gives one process its part. Looking is apart from
deciding: the policy is pure, so that topologies of machines one does not own serve as tests.
"""

from .assignment import Assignment, assign, place
from .discovery import discover, recorded
from .model import Core, Distance, Gpu, Nic, Place, Topology, distance, hops
from .policy import LeftOut, Plan, Share, plan
from .processes import LocalProcess, local_process
from .rdma import RdmaPort, rdma_ports

__all__ = [
    "Assignment",
    "Core",
    "Distance",
    "Gpu",
    "LeftOut",
    "LocalProcess",
    "Nic",
    "Place",
    "Plan",
    "RdmaPort",
    "Share",
    "Topology",
    "assign",
    "discover",
    "distance",
    "hops",
    "local_process",
    "place",
    "plan",
    "rdma_ports",
    "recorded",
]
