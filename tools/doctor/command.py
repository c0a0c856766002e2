"""The `doctor` command."""

from __future__ import annotations

import json

import click

import transfer_engine as te

from .. import report as output
from .examine import TRANSPORTS, examine
from .show import show

_EPILOG = """\b
Exit status:
    0  no problem; notes and warnings do not count
    1  a problem: no transport works, say
    2  the settings in the environment refuse every engine
    3  a transport that must work does not, or that is not known

\b
The document that --json prints:
{"schema": "transfer-engine/doctor/1", "version", "ok", "status",
 "severity": the gravest of all, "counts": {severity: how many},
 "findings": [{"id", "severity": "ok" | "note" | "warning" | "problem",
               "what", "consequence", "remedy", "facts": {...}}]}
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--transport", "wanted", multiple=True, type=click.Choice(TRANSPORTS),
    help="Must work: the exit status is 3 when it does not. May be repeated.  [default: $TE_TRANSPORT]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text for people.")
def doctor(wanted: tuple[str, ...], as_json: bool) -> int:
    """Say what is here, what is missing, and what to do about it.

    Looks at libfabric and its providers, RDMA devices, CUDA and GPUs, GDRCopy, memory limits, huge pages, shared
    memory, CPUs, NUMA, hwloc and the settings in the environment, with which it opens an engine and closes it. Changes
    nothing and needs no privileges.
    """
    found = examine(wanted)
    if as_json:
        severities = [finding.severity.name.lower() for finding in found.findings]
        document = {
            "schema": "transfer-engine/doctor/1",
            "version": te.__version__,
            "ok": found.status == 0,
            "status": found.status,
            "severity": found.gravest.name.lower(),
            "counts": {name: severities.count(name) for name in dict.fromkeys(severities)},
            "findings": [finding.to_dict() for finding in found.findings],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        show(output.console(), found)
    return found.status
