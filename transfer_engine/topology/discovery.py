"""This machine's topology, or a recorded one: through hwloc where it is installed, else from sysfs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError
from . import hwloc, recording, sysfs
from .model import Topology


def discover() -> Topology:
    """This machine as this process sees it. Never raises: what cannot be found is missing and named in `notes`.

    hwloc's own variables hold: HWLOC_XMLFILE puts a recorded machine in place of this one.
    """
    try:
        text, version, this_machine = hwloc.export()
        topology = recording.parse(text, f"hwloc {version}")
    except (hwloc.HwlocUnavailable, recording.RecordingError) as cause:
        found = sysfs.complete(sysfs.discover())
        return replace(found, notes=(*found.notes, f"read from sysfs alone: {cause}"))
    if not this_machine:
        note = "not this machine: HWLOC_XMLFILE is set"
        return replace(topology, source=f"{topology.source}, recorded", notes=(note,))
    return sysfs.complete(topology)


def recorded(path: Path) -> Topology:
    """A machine that `lstopo --of xml` recorded. hwloc checks and completes it where it is installed.

    Raises:
        ConfigError: no such file, or no such recording.
    """
    try:
        size_ok = path.stat().st_size <= recording.MOST_BYTES
        text = path.read_text("utf-8", "replace") if size_ok else ""
        recording.parse(text, str(path))  # foreign bytes are looked at here before a library gets them
        note: tuple[str, ...] = ()
        try:
            text, _, _ = hwloc.export(path)
        except hwloc.HwlocUnavailable as cause:
            note = (f"read without hwloc: {cause}",)
        found = recording.parse(text, str(path))
    except OSError as cause:
        raise ConfigError(
            f"{path}: {cause.strerror or cause}", operation="topology", hint="name a file of `lstopo --of xml FILE`"
        ) from None
    except recording.RecordingError as cause:
        raise ConfigError(
            str(cause), operation="topology", hint="record a machine with `lstopo --whole-io --of xml FILE`"
        ) from None
    return replace(found, notes=(*found.notes, *note))
