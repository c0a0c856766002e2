"""One suite for all transports: each scenario runs over sim, tcp and shm, in one process and in two.

A transport that is missing fails the suite, unless TE_TEST_SKIP_TRANSPORTS names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .rig import LIFE_S, SKIPPED, TRANSPORTS, Case, Child, Rig, on


def pytest_configure(config: pytest.Config) -> None:
    unknown = set(SKIPPED) - set(TRANSPORTS)
    if unknown:
        raise pytest.UsageError(f"TE_TEST_SKIP_TRANSPORTS names {', '.join(unknown)}; known: {', '.join(TRANSPORTS)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("cases") or on().mark
    metafunc.parametrize(
        "case",
        [
            pytest.param(case, id=str(case), marks=skipped_by_request if case.transport.name in SKIPPED else ())
            for case in mark.args[0]
        ],
        indirect=True,
    )


# In the emulated guest all takes tens of times as long: there each scenario of these files runs in one case, with the
# other side in a process of its own where that is one of its cases. TE_TEST_ALL=1 runs all.
GUEST_FILES = (
    "test_writes", "test_pages", "test_messages", "test_counters", "test_regions", "test_peers", "test_deadlines",
    "test_scatter", "test_barrier", "test_prepared",
)  # fmt: skip
GUEST_TOO_LONG = (
    "test_more_pages_than_one_notification_can_name_are_counted_exactly",
    "test_many_peers_come_and_go_without_a_collective_step",
    "test_messages_of_many_senders_are_each_in_order",
    "test_notifications_that_came_before_anybody_waited_are_there",
    "test_hundreds_of_cancelled_transfers_leave_everything_in_order",
)

if os.environ.get("TE_RDMA_GUEST") and not os.environ.get("TE_TEST_ALL"):
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.stem not in GUEST_FILES]


def has_case(item: pytest.Function) -> bool:
    return isinstance(item.callspec.params["case"], Case)  # else none of its cases is for this machine


def apart(item: pytest.Function) -> bool:
    return has_case(item) and item.callspec.params["case"].apart


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("TE_RDMA_GUEST") or os.environ.get("TE_TEST_ALL"):
        return
    chosen: dict[str, pytest.Item] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or "case" not in item.fixturenames:
            continue
        first = chosen.setdefault(item.originalname, item)
        if apart(item) and not apart(first):
            chosen[item.originalname] = item
    kept = [
        item
        for item in items
        if not isinstance(item, pytest.Function)
        or "case" not in item.fixturenames
        or (chosen[item.originalname] is item and item.originalname not in GUEST_TOO_LONG and has_case(item))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


skipped_by_request = pytest.mark.skip(reason="TE_TEST_SKIP_TRANSPORTS names it")


@pytest.fixture(scope="session")
def shared_child() -> Iterator[Callable[[], Child]]:
    """The other process, started on first use."""
    children: list[Child] = []

    def child() -> Child:
        if not children:
            children.append(Child())
        return children[0]

    yield child
    for started in children:
        started.close()


@pytest.fixture
def spawn() -> Iterator[Callable[[], Child]]:
    """Starts further processes, which may be killed."""
    children: list[Child] = []

    def start() -> Child:
        children.append(Child())
        return children[-1]

    yield start
    for child in children:
        child.close()


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    wanted: Case = request.param
    for variable, value in wanted.transport.environment:
        monkeypatch.setenv(variable, value)
    return wanted


@pytest.fixture
def rig(case: Case, spawn: Callable[[], Child], shared_child: Callable[[], Child]) -> Iterator[Rig]:
    made = Rig(case, spawn, shared_child)
    yield made
    made.close()


@pytest.fixture
def life(rig: Rig) -> dict[str, Any]:
    settings = {"peer_timeout_s": LIFE_S, "connect_timeout_s": LIFE_S + 0.1, "shard_bytes": 1000}
    rig.set_up(**settings)
    return settings
