"""What the doctor says: findings with stable names. Pure values."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any


class Severity(enum.IntEnum):
    """How grave a finding is.

    OK: as it should be. NOTE: worth knowing; nothing is lost by it here. WARNING: something works less well than it
    could, or will not work under load. PROBLEM: something that is wanted cannot work.
    """

    OK = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        id: stable name, "area.thing"; programs may rely on it.
        severity: how grave it is.
        what: what is here, in one sentence.
        consequence: what follows from it; empty when nothing does.
        remedy: what to do about it; empty when there is nothing to do.
        facts: the values behind the sentence; plain types.
    """

    id: str
    severity: Severity
    what: str
    consequence: str = ""
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def area(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {**dataclasses.asdict(self), "severity": self.severity.name.lower()}


def fine(name: str, what: str, **facts: Any) -> Finding:
    """As it should be."""
    return Finding(name, Severity.OK, what, facts=facts)


def note(name: str, what: str, consequence: str = "", remedy: str = "", **facts: Any) -> Finding:
    """Worth knowing."""
    return Finding(name, Severity.NOTE, what, consequence, remedy, facts)


def warning(name: str, what: str, consequence: str, remedy: str, **facts: Any) -> Finding:
    """Less well than it could be."""
    return Finding(name, Severity.WARNING, what, consequence, remedy, facts)


def problem(name: str, what: str, consequence: str, remedy: str, **facts: Any) -> Finding:
    """Cannot work."""
    return Finding(name, Severity.PROBLEM, what, consequence, remedy, facts)
