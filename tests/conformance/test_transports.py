"""Every rung of the ladder is there, and engines say truthfully what they are."""

from __future__ import annotations

import pytest

import transfer_engine as te

from .rig import SKIPPED, TRANSPORTS, Rig, on


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_of_this_suite_is_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in SKIPPED:
        pytest.skip("TE_TEST_SKIP_TRANSPORTS names it")
    for variable, value in TRANSPORTS[name].environment:
        monkeypatch.setenv(variable, value)
    found = te.probe(TRANSPORTS[name].engine)
    assert found["transport"] == TRANSPORTS[name].engine
    assert found["provider"]
    assert found["library"]


@on(nics=(1, 16), nics_apart=(3,))
def test_an_engine_is_what_was_asked_for(rig: Rig) -> None:
    asked = rig.case.settings()
    for told, address, stats in (
        (rig.near.describe(), rig.near.address, rig.near.stats()),
        (rig.far.describe(), rig.far.address(), rig.far.stats()),
    ):
        assert told["transport"] == address.transport == asked["transport"]
        assert told["nics"] == len(address.nics) == len(stats["nics"]) == asked["nic_count"]
        assert all(nic["up"] for nic in stats["nics"].values())
        assert told["identity"] == address.identity.hex()
        assert told["generation"] == address.generation


@on(nics=(1,), apart=False)
def test_an_engine_tells_what_its_transport_can_do(rig: Rig) -> None:
    told = rig.near.describe()
    for name in ("delivery_complete", "ordered_writes", "keys_enforced", "wait_fd"):
        assert isinstance(told[name], bool)
    assert told["polling"] in ("busy", "adaptive")
    assert told["max_write_bytes"] >= 4096
    assert told["max_message_fragment"] >= 1024


@on(nics=(1,), apart=False)
def test_faults_are_injected_where_they_can_be_and_refused_elsewhere(rig: Rig) -> None:
    if rig.case.transport.faults:
        rig.near._inject("stats")
    else:
        with pytest.raises(te.TransferEngineError):
            rig.near._inject("stats")
    link = rig.link(100)
    link.write(0, 0, 100).wait()
    link.wait(1)
    link.check([(0, 0, 100)], 1)


def test_a_transport_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(te.ConfigError, match="telegraph"):
        te.Engine("telegraph")


@pytest.mark.parametrize("name", ["efa", "cx7"])
def test_a_transport_without_its_device_is_unavailable_with_the_reason(name: str) -> None:
    try:
        te.probe(name)
    except te.TransportUnavailable as error:
        missing = error
    else:
        te.Engine(name).close()
        return
    with pytest.raises(te.TransportUnavailable) as caught:
        te.Engine(name)
    for error in (missing, caught.value):
        assert any(word in error.message for word in (name, "libfabric", "libibverbs", "RDMA device"))
        assert error.hint
