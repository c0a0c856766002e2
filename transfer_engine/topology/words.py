"""Numbers in sentences. Pure."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """As in "1 core", "2 cores"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
