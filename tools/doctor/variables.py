"""The settings in the environment: mistyped and wrong ones, and whether an engine opens with them."""

from __future__ import annotations

import difflib

import transfer_engine as te

from .findings import Finding, fine, problem, warning
from .host import ChildFailed, ChildTimedOut, Host

_OTHERS = {
    "TE_CLUSTER_TOKEN", "TE_CLUSTER_TOKEN_FILE", "TE_HWLOC", "TE_LIBFABRIC", "TE_LIBIBVERBS", "TE_RENDEZVOUS",
    "TE_TCP_PROVIDER",
}  # fmt: skip
_LAUNCHERS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def look(host: Host) -> list[Finding]:
    """Each variable by itself, then all of them in an engine that is opened and closed."""
    rows = {row["variable"]: row["name"] for row in te.Settings.table()}
    wrong = _wrong(host, rows)
    return [*_mistyped(host, {*rows, *_OTHERS}), *wrong, *([] if wrong else _engines(host, set(rows)))]


def _mistyped(host: Host, known: set[str]) -> list[Finding]:
    findings = []
    for variable in sorted(host.environment):
        if not variable.startswith("TE_") or variable in known or variable.startswith("TE_TEST"):
            continue
        close = next(iter(difflib.get_close_matches(variable, known, n=1, cutoff=0.8)), None)
        if close:
            what = f"{variable} is set, but is no setting"
            findings.append(warning(f"settings.{variable}", what, "it has no effect", f"did you mean {close}?"))
    return findings


def _wrong(host: Host, rows: dict[str, str]) -> list[Finding]:
    findings = []
    for variable, name in rows.items():
        value = host.environment.get(variable)
        if value is None:
            continue
        try:
            te.Settings.check(name, value)
        except te.TransferEngineError as cause:
            text = cause.message.partition(": ")[2]
            findings.append(
                problem(f"settings.{variable}", f"{variable}: {text}", "every engine is refused", "correct or unset it")
            )
    return findings


def _engines(host: Host, settings: set[str]) -> list[Finding]:
    """An engine on the transport that would be chosen; with options for it, one on the simulated fabric, too."""
    findings = []
    chosen = host.environment.get("TE_TRANSPORT")
    for transport in ("", "sim") if host.environment.get("TE_SIM") and chosen != "sim" else ("",):
        name = f"settings.engine.{transport}" if transport else "settings.engine"
        call = f'te.Engine("{transport}")' if transport else "te.Engine()"
        try:
            found = host.child("engine", transport)
        except ChildTimedOut as cause:
            so, do = f"whether {call} opens is not known", "look again when the machine is less busy"
            findings.append(warning(name, f"opening an engine: {cause}", so, do))
            continue
        except ChildFailed as cause:
            findings.append(
                warning(
                    name, f"opening an engine failed: {cause}", f"{call} fails", "set FI_LOG_LEVEL=warn and look again"
                )
            )
            continue
        if "refused" in found:
            relevant = {*settings, *_LAUNCHERS, "TE_LIBFABRIC", "TE_LIBIBVERBS", "TE_TCP_PROVIDER"}
            given = {key: value for key, value in sorted(host.environment.items()) if key in relevant}
            texts = ", ".join(f"{key}={value}" for key, value in given.items())
            findings.append(
                problem(
                    name,
                    f"{call} is refused: {found['refused']}",
                    "no engine can be opened with these settings",
                    f"correct or unset the one that is meant, of those in the environment: {texts}"
                    if given
                    else str(found["hint"]),
                    variables=given,
                )
            )
        elif "unavailable" not in found:  # that is said of the transport
            with_nics = ", ".join(found["nics"])
            findings.append(fine(name, f"{call} opens on {found['transport']}, NICs {with_nics}", **found))
    return findings
