"""How many rendezvous this process has opened on a store: the number is part of their keys, so that they do not mix.

Every rank counts by itself; the numbers agree because every rank opens the same ones in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

_lock = threading.Lock()
_by_address: Counter[Hashable] = Counter()
_by_store: weakref.WeakKeyDictionary[Any, Counter[Hashable]] = weakref.WeakKeyDictionary()
_kept: list[tuple[Any, Counter[Hashable]]] = []  # stores that allow no weak references, so that none takes their place


def following(store: Any, member: Hashable) -> int:
    """The number of the next rendezvous.

    Args:
        store: a store object, or the text that says where a store is.
        member: what tells apart those that count separately: name, rank, number of ranks.
    """
    with _lock:
        return _counter(store)[_key(store, member)] + 1


def opened(store: Any, member: Hashable) -> None:
    """It has been opened. Those that failed do not count: a rank may try again."""
    with _lock:
        _counter(store)[_key(store, member)] += 1


def _key(store: Any, member: Hashable) -> Hashable:
    return (store, member) if isinstance(store, str) else member


def _counter(store: Any) -> Counter[Hashable]:
    if isinstance(store, str):
        return _by_address
    try:
        return _by_store.setdefault(store, Counter())
    except TypeError:
        for other, counter in _kept:
            if other is store:
                return counter
        _kept.append((store, Counter()))
        return _kept[-1][1]
