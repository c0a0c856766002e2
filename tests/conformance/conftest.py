"""One suite for all transports: each scenario runs over sim, tcp and shm, in one process and in two.

A transport that is missing fails the suite, unless TE_TEST_SKIP_TRANSPORTS names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .rig import SKIPPED, TRANSPORTS, Case, Child, Rig, on


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cases(list): where a scenario runs; made by rig.on()")
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
