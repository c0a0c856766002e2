"""The report for people: one line a finding, and below what is not as it should be, what follows and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transfer_engine.topology.words import count

from .examine import Report
from .findings import Finding, Severity

_TITLES = {
    "package": "Package", "libfabric": "libfabric", "transport": "Transports", "verbs": "RDMA devices",
    "gpu": "GPUs", "memory": "Memory", "cpu": "CPUs", "topology": "Topology", "network": "Network",
    "settings": "Settings",
}  # fmt: skip
_MARKS = {
    Severity.OK: "[green]ok     [/]",
    Severity.NOTE: "[cyan]note   [/]",
    Severity.WARNING: "[yellow]warning[/]",
    Severity.PROBLEM: "[bold red]problem[/]",
}


def show(out: Console, report: Report) -> None:
    """Everything, then one line that sums up."""
    for area, findings in groupby(report.findings, key=lambda finding: finding.area):
        out.print(f"[bold]{_TITLES.get(area, area)}[/]")
        table = Table.grid(padding=(0, 1), pad_edge=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            table.add_row(_MARKS[finding.severity], _text(finding))
        out.print(table)
    out.print(_summary(report.findings), soft_wrap=True)


def _text(finding: Finding) -> str:
    lines = [escape(finding.what)]
    if finding.severity is not Severity.OK:
        lines += [f"[dim]so:[/] {escape(finding.consequence)}"] * bool(finding.consequence)
        lines += [f"[dim]do:[/] {escape(finding.remedy)}"] * bool(finding.remedy)
    return "\n".join(lines)


def _summary(findings: Sequence[Finding]) -> str:
    severities = [finding.severity for finding in findings]
    counts = [(severities.count(one), one.name.lower()) for one in sorted(Severity, reverse=True) if one in severities]
    line = "[bold]" + ", ".join(f"{n} ok" if name == "ok" else count(n, name) for n, name in counts) + "[/]"
    worst = max(findings, key=lambda finding: finding.severity, default=None)  # the first of the gravest
    if worst is None or worst.severity < Severity.WARNING:
        return line
    return f"{line}: {_TITLES.get(worst.area, worst.area)}: {escape(worst.what)}"
