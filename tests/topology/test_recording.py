"""hwloc's XML: with the library and without it, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import Branch, Machine, gpu, nic, standard

import transfer_engine as te
from transfer_engine import topology
from transfer_engine.topology import cpusets, hwloc
from transfer_engine.topology.recording import RecordingError, parse


def hwloc_missing() -> str | None:
    try:
        hwloc.load()
    except hwloc.HwlocUnavailable as cause:
        return str(cause)
    return None


needs_hwloc = pytest.mark.skipif(hwloc_missing() is not None, reason=hwloc_missing() or "")

MACHINES = {
    "8 NICs": standard(8),
    "32 NICs": standard(32),
    "one switch": Machine([Branch([gpu(), gpu(), nic(0), nic(1)], 0)], packages=1),
    "no locality": standard(8, package_of=(None,) * 8),
    "no devices": Machine([], packages=1, cores=1, smt=1),
    "hidden": Machine([Branch([gpu(), nic(0, hidden=True)], 1)]),
}


@needs_hwloc
@pytest.mark.parametrize("name", MACHINES)
def test_the_library_and_the_parser_see_the_same_machine(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    direct = parse(machine.xml(), str(tmp_path / "machine.xml"))
    assert topology.recorded(machine.write_xml(tmp_path / "machine.xml")) == direct


def test_a_real_guest_with_one_gpu_and_a_virtual_nic() -> None:
    """Recorded with hwloc 2.9 on a virtual machine whose devices are all on one flat bus, without NUMA information."""
    found = topology.recorded(Path(__file__).with_name("recorded") / "one_gpu_guest.xml")
    assert [(one.model, one.place.numa) for one in found.gpus] == [("10de:2335", 0)]
    assert [(one.name, one.rdma, one.place.bus_id) for one in found.nics] == [("eth0", None, "0000:00:03.0")]
    assert topology.distance(found.gpus[0].place, found.nics[0].place) is topology.Distance.HOST_BRIDGE
    mine = topology.assign(found, 0, 1)
    assert (mine.nics, mine.core, mine.left_out) == (("eth0",), 1, ())


def test_without_the_library_a_recording_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_HWLOC", "libno-such-hwloc.so.1")
    found = topology.recorded(standard(8).write_xml(tmp_path / "machine.xml"))
    assert len(found.gpus) == len(found.nics) == 8
    assert "read without hwloc: libno-such-hwloc.so.1" in found.notes[0]


def test_without_the_library_this_machine_is_read_from_sysfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_HWLOC", "libno-such-hwloc.so.1")
    found = topology.discover()
    assert found.source == "sysfs"
    assert found.cores
    assert "from sysfs alone" in found.notes[0]


@needs_hwloc
def test_hwlocs_own_variable_puts_a_recording_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWLOC_XMLFILE", str(standard(16).write_xml(tmp_path / "machine.xml")))
    found = topology.discover()
    assert len(found.nics) == 16
    assert found.notes == ("not this machine: HWLOC_XMLFILE is set",)


@needs_hwloc
def test_both_ways_see_the_same_cores_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    through_hwloc = topology.discover()
    monkeypatch.setenv("TE_HWLOC", "libno-such-hwloc.so.1")
    assert [core.cpus for core in topology.discover().cores] == [core.cpus for core in through_hwloc.cores]


def test_disallowed_cpus_are_known(tmp_path: Path) -> None:
    machine = Machine([], packages=1, cores=4, smt=1, disallowed=frozenset((3,)))
    found = topology.recorded(machine.write_xml(tmp_path / "machine.xml"))
    assert found.allowed == frozenset((0, 1, 2))
    assert found.cpus == frozenset(range(4))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not XML"),
        ("nonsense", "not XML"),
        ("<a/>", "no topology"),
        ("<topology version='2.0'/>", "no topology"),
        ("<topology><object type='Machine'/></topology>", "version 1"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><topology version='2.0'/>", "no topology"),
        ("<topology version='2.0'><object type='Machine' cpuset='zz'/></topology>", "damaged"),
        ("<topology version='2.0'><object type='Machine' cpuset='0xf...f'/></topology>", "damaged"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_reason(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file.xml"
    path.write_text(text)
    with pytest.raises(te.ConfigError, match=reason):
        topology.recorded(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(te.ConfigError, match=r"absent\.xml: No such file"):
        topology.recorded(tmp_path / "absent.xml")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_recording_gives_a_topology_or_the_one_error(data: st.DataObject) -> None:
    text = list(MACHINES["one switch"].xml())
    for _ in range(data.draw(st.integers(1, 8))):
        position = data.draw(st.integers(0, len(text) - 1))
        text[position : position + data.draw(st.integers(0, 40))] = data.draw(st.text('<>/="0x19[]:abf ', max_size=6))
    try:
        found = parse("".join(text), "a recording")
    except RecordingError:
        return
    assert found.source == "a recording"


@given(st.frozensets(st.integers(0, 700)))
def test_sets_of_cpus_round_trip(cpus: frozenset[int]) -> None:
    assert not cpus or cpusets.from_list(cpusets.to_list(cpus)) == cpus
    from machines import bitmap

    assert cpusets.from_bitmap(bitmap(cpus)) == cpus


def test_sets_of_cpus_in_words_of_people() -> None:
    assert cpusets.to_list((0, 1, 2, 8, 10, 11)) == "0-2,8,10-11"
    assert cpusets.to_list(()) == "none"
    assert cpusets.from_bitmap("0x1,,0x3") == frozenset((0, 1, 64))
    for text in ("3-1", "x", "0-99999999", "-4"):
        with pytest.raises(ValueError):
            cpusets.from_list(text)
