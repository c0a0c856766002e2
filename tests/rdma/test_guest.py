"""The guest ends as its command does, in time, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .launch import guest

SOON_S = 60.0


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("not in time")


def emulator_of(launcher: subprocess.Popen[str]) -> Path:
    """QEMU's folder in /proc."""

    def search() -> Path | None:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        found = [Path("/proc", child) for child in children]
        return next((path for path in found if "qemu" in (path / "comm").read_text()), None)

    return until(search)


def runs(process: Path) -> bool:
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_output_and_status_are_those_of_the_command() -> None:
    with guest("--", "sh", "-c", "seq 100000; echo problem >&2; exit 42") as process:
        out, err = process.communicate()
    assert process.returncode == 42
    assert out == "".join(f"{number}\n" for number in range(1, 100001))
    assert "problem\n" in err


def test_a_guest_that_takes_too_long_is_ended_and_shows_its_console() -> None:
    with guest("--timeout", "1", "--", "true") as process:
        _, err = process.communicate()
    assert process.returncode == 124
    assert "not done after 1 s" in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_emulator_outlives_its_launcher(number, status) -> None:
    with guest("--", "sleep", "1000") as process:
        emulator = emulator_of(process)
        process.send_signal(number)
        assert process.wait(SOON_S) == status
        until(lambda: not runs(emulator))
