"""Rendezvous: how the ranks of a job exchange addresses and descriptors before their engines know each other.

`te.Rendezvous()` under torchrun needs no arguments. `environment.py` has the rules by which the store is found.
"""

from .client import TcpStore
from .group import Rendezvous
from .server import StoreServer

__all__ = ["Rendezvous", "StoreServer", "TcpStore"]
