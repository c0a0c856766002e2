"""Ranks in processes of their own, with memory of the host in place of a device's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .players import World, worlds


@pytest.fixture
def world() -> Iterator[Callable[[int], World]]:
    with worlds(Path(__file__).with_name("rank.py")) as start:
        yield start
