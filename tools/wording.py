"""Errors as the command line tells them: hints about Python's interface give way to ones about the commands."""

from __future__ import annotations

import transfer_engine as te

_HINTS: dict[type[te.TransferEngineError], str] = {
    te.ConfigError: "correct what is named above; `transfer-engine doctor` checks settings, --help lists options",
    te.TransportUnavailable: "`transfer-engine doctor` says what is missing and what to do about it",
    te.PeerUnreachable: "see that `transfer-engine serve` runs there, and paste the line that it printed last",
    te.PeerLost: "look at the output of the other side, then run this again with the line that `serve` printed last",
    te.PeerRestarted: "paste the line that `transfer-engine serve` printed last",
    te.TransferTimeout: "look at the output of the other side; --timeout raises the limit",
    te.TransportError: "`transfer-engine doctor` checks the transport; FI_LOG_LEVEL=warn shows libfabric's complaints",
    te.DescriptorError: "copy the whole line that `transfer-engine serve` printed; both sides need compatible versions",
}


def told(error: Exception) -> str:
    """The whole text."""
    if isinstance(error, te.TransferEngineError) and error.hint == type(error).default_hint:
        error.hint = _HINTS.get(type(error), error.hint)
    return str(error)


def told_briefly(error: Exception) -> str:
    """What happened, on one line, for a log."""
    return error.message if isinstance(error, te.TransferEngineError) else str(error).partition("\n")[0]
