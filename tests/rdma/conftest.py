"""Where these tests run: most inside of the guest, which says so in the environment, some on the host, beside guests.

`make test-rdma` runs the ones, `make test-rdma-wire` the others; elsewhere none is collected.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import network

HERE = Path(__file__).parent
HOST_SIDE = {"test_guest.py", "test_wire.py"}
TESTS = {path.name for path in HERE.glob("test_*.py")}

if os.environ.get("TE_RDMA_GUEST"):
    collect_ignore = sorted(HOST_SIDE)
elif os.environ.get("TE_RDMA_HOST"):
    collect_ignore = sorted(TESTS - HOST_SIDE)
else:
    collect_ignore = sorted(TESTS)


def forbid_skipping(report: pytest.TestReport | pytest.CollectReport) -> None:
    """What is missing here is a failure: the guest exists to have it."""
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which nothing in this folder may be: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    forbid_skipping(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    forbid_skipping(report)
    return report


class Player:
    """Calls of the functions in player.py, which runs under the system's Python: that one has pyverbs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "the player has ended"}')
        if "error" in answer:
            pytest.fail(answer["error"], pytrace=False)
        return answer["result"]


@pytest.fixture(scope="session")
def player() -> Iterator[Player]:
    """Called with the name of the function and its arguments."""
    command = ["/usr/bin/python3", "-I", str(HERE / "player.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Player(process)
        finally:
            process.kill()


@pytest.fixture
def netem() -> Callable[..., Any]:
    return network.netem


@pytest.fixture
def link_down() -> Callable[..., Any]:
    return network.link_down


@pytest.fixture
def counters() -> Callable[[str], dict[str, int]]:
    return network.counters
