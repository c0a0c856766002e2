"""`transfer-engine doctor`: right on every kind of machine, and never an exception."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import CONNECTX7, EFA, Branch, Machine, gpu, nic, standard
from ports import V1, V2, ZERO, Gid, write_port
from rich.console import Console
from transfer_engine.tools.doctor import command, examine, limits
from transfer_engine.tools.doctor.examine import Report
from transfer_engine.tools.doctor.findings import Finding, Severity
from transfer_engine.tools.doctor.host import ChildFailed, ChildTimedOut, Host
from transfer_engine.tools.doctor.show import show
from trees import put, write_tree

import transfer_engine as te
from transfer_engine import topology


class FakeHost(Host):
    """A tree of files, and answers in place of the looks that load libraries."""

    def __init__(self, root: Path, **answers: Any) -> None:
        super().__init__(root, {})
        self.answers: dict[str, Any] = {"libfabric": {"missing": "no such file"}, "cuda": {"missing": "no such file"}}
        self.answers.update(answers)
        self.libraries: set[str] = set()
        self.limits: dict[int, int | None] = {}
        self.root_user = False

    @property
    def is_root(self) -> bool:
        return self.root_user

    def limit(self, which: int) -> int | None:
        return self.limits.get(which, super().limit(which))

    def library(self, *names: str) -> tuple[str | None, str]:
        return next(((name, "") for name in names if name in self.libraries), (None, "no such file"))

    def child(self, *arguments: str) -> dict[str, Any]:
        if arguments[0] == "engine":
            return dict(self.answers.get("engine", {"transport": "tcp", "nics": ["eth0"], "core": None}))
        if arguments[0] == "probe":
            reason = "libfabric.so.1 not found"
            return {"unavailable": reason} if arguments[1] != "sim" else {"provider": "sim", "library": "built in"}
        answer = self.answers.get(arguments[0], {"errno": 1})
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


def by_id(report: Report) -> dict[str, Finding]:
    found = {finding.id: finding for finding in report.findings}
    assert len(found) == len(report.findings), "ids are unique"
    return found


@pytest.fixture
def on(tmp_path: Path) -> Callable[..., FakeHost]:
    def make(machine: Machine | None = None, **answers: Any) -> FakeHost:
        if machine is not None:
            write_tree(machine, tmp_path)
        (tmp_path / "dev/shm").mkdir(parents=True, exist_ok=True)
        return FakeHost(tmp_path, **answers)

    return make


# --- this machine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here() -> Report:
    return examine.examine()


def test_this_machine_is_looked_at_without_a_failure(here: Report) -> None:
    found = by_id(here)
    assert here.status == 0
    assert not [finding for finding in here.findings if "could not be looked at" in finding.what]
    for name in (
        "package.versions", "libfabric.library", "transport.efa", "transport.cx7", "transport.tcp", "transport.shm",
        "transport.sim", "transport.default", "verbs.library", "verbs.devices", "gpu.driver", "memory.memlock",
        "memory.hugepages", "memory.shm", "memory.cross_memory", "memory.files", "cpu.allowed", "cpu.numa",
        "topology.hwloc", "topology.nics", "network.interfaces",
    ):  # fmt: skip
        assert name in found, name


def test_transports_are_judged_as_probe_judges_them(here: Report) -> None:
    for transport in examine.TRANSPORTS:
        finding = by_id(here)[f"transport.{transport}"]
        assert (finding.severity is Severity.OK) is _works(transport)


def test_whatever_is_not_fine_says_what_follows(here: Report) -> None:
    for finding in here.findings:
        assert finding.what
        if finding.severity >= Severity.WARNING:
            assert finding.consequence
            assert finding.remedy


def test_the_document_is_json_with_the_promised_fields() -> None:
    result = CliRunner().invoke(command.doctor, ["--json"], standalone_mode=False)
    document = json.loads(result.output)
    assert (document["schema"], document["ok"], document["status"]) == ("transfer-engine/doctor/1", True, 0)
    assert sum(document["counts"].values()) == len(document["findings"])
    for finding in document["findings"]:
        assert set(finding) == {"id", "severity", "what", "consequence", "remedy", "facts"}
        assert finding["severity"] in ("ok", "note", "warning", "problem")


def test_a_transport_that_was_asked_for_decides_the_exit_status() -> None:
    missing = [name for name in ("efa", "cx7") if not _works(name)]
    if not missing:
        pytest.skip("both RDMA transports work here")
    result = CliRunner().invoke(command.doctor, ["--transport", missing[0]], standalone_mode=False)
    assert result.return_value == 3
    assert "problem" in result.output
    result = CliRunner().invoke(command.doctor, ["--transport", "sim"], standalone_mode=False)
    assert result.return_value == 0


def _works(transport: str) -> bool:
    try:
        te.probe(transport)
    except te.TransportUnavailable:
        return False
    return True


PROGRAM = (
    "import sys; from transfer_engine.tools.doctor.command import doctor; sys.exit(doctor.main(standalone_mode=False))"
)


def run_alone(status: int = 0, **more: Any) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--json"], capture_output=True, text=True, timeout=100, check=False, **more
    )
    assert done.returncode == status, done.stderr
    return {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.mark.multiprocess
def test_one_cpu_is_noticed() -> None:
    cpu = min(os.sched_getaffinity(0))
    found = run_alone(preexec_fn=lambda: os.sched_setaffinity(0, {cpu}))
    assert found["cpu.allowed"]["severity"] == "warning"
    assert found["cpu.allowed"]["facts"]["allowed"] == [cpu]


@pytest.mark.multiprocess
def test_a_missing_libfabric_is_named_with_what_it_costs() -> None:
    found = run_alone(status=1, env={**os.environ, "TE_LIBFABRIC": "libno-such-fabric.so.1"})
    assert found["libfabric.library"]["severity"] == "warning"
    assert "libno-such-fabric" in found["libfabric.library"]["what"]
    assert found["transport.default"]["severity"] == "problem"
    for name in ("libfabric.library", "transport.tcp", "transport.shm", "transport.default"):
        assert "TE_LIBFABRIC" in found[name]["remedy"]
        assert "install" not in found[name]["what"] + found[name]["remedy"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("TE_NICS", "nope", "NIC nope: no such network interface"),
        ("TE_CORE", "4000", "core is 4000"),
        ("TE_SIM", "foo=1", '"foo" is unknown'),
        ("TE_POLLING", "often", "one of auto, busy, adaptive"),
    ],
)
def test_settings_that_refuse_every_engine_are_named(variable: str, value: str, text: str) -> None:
    environment = {name: given for name, given in os.environ.items() if not name.startswith("TE_")}
    found = run_alone(status=2, env={**environment, variable: value})
    [problem] = [finding for finding in found.values() if finding["severity"] == "problem"]
    assert problem["id"].startswith("settings.")
    assert text in problem["what"]
    assert variable in problem["what"] + problem["remedy"]


@pytest.mark.multiprocess
def test_a_provider_that_is_not_there_is_named() -> None:
    found = run_alone(env={**os.environ, "TE_TCP_PROVIDER": "foo"})
    finding = found["transport.tcp"]
    assert "TE_TCP_PROVIDER=foo" in finding["what"]
    assert "unset it" in finding["remedy"]
    assert "install" not in finding["remedy"]


@pytest.mark.multiprocess
def test_the_transport_of_the_environment_is_wanted() -> None:
    if _works("efa"):
        pytest.skip("efa works here")
    found = run_alone(status=3, env={**os.environ, "TE_TRANSPORT": "efa"})
    assert found["transport.efa"]["severity"] == "problem"
    assert "TE_TRANSPORT" in found["transport.efa"]["what"]


def test_an_engine_that_opens_is_fine_and_doctor_agrees_with_topo(here: Report) -> None:
    found = by_id(here)
    assert found["settings.engine"].severity is Severity.OK
    assert found["settings.engine"].facts["transport"] in found["transport.default"].what
    assert found["libfabric.library"].facts["tcp_provider"] == te.probe("tcp")["provider"]
    if found["topology.hwloc"].severity is Severity.OK:
        assert topology.discover().source == f"hwloc {found['topology.hwloc'].facts['version']}"


def test_what_this_machine_cannot_have_is_not_advised(on: Callable[..., FakeHost]) -> None:
    finding = by_id(examine.examine((), on()))["transport.efa"]
    assert finding.what == "efa does not work here: no EFA device is here"
    assert finding.remedy.startswith("nothing, unless")
    host = on(Machine([Branch([nic(0, EFA)], 0)]), libfabric={"version": "1.17.0", "file": "", "providers": {}})
    assert "EFA installer" in by_id(examine.examine((), host))["transport.efa"].remedy


def in_a_child(prepare: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """The findings of a forked child that has prepared itself: it may not even be able to start the interpreter."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare()
            document = [finding.to_dict() for finding in examine.examine().findings]
            with os.fdopen(writing, "w") as out:
                json.dump(document, out)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return {finding["id"]: finding for finding in json.loads(text)}


@pytest.mark.multiprocess
def test_an_unprivileged_user_with_little_locked_memory_is_served() -> None:
    def become_nobody() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)

    found = in_a_child(become_nobody)
    assert found["memory.memlock"]["facts"]["limit_bytes"] == 65536
    assert "an unprivileged user" in found["package.versions"]["what"]
    assert not [finding for finding in found.values() if "could not be looked at" in finding["what"]]


def test_a_child_that_ends_badly_is_told_from_one_that_answers() -> None:
    with pytest.raises(ChildFailed, match="status 1: KeyError"):
        Host().child("no such look")
    assert Host().child("probe", "sim")["provider"] == "sim"
    assert "unavailable" in Host().child("probe", "no such transport")


# --- other machines -------------------------------------------------------------------------------------------------


def test_a_bare_container_is_judged(on: Callable[..., FakeHost]) -> None:
    report = examine.examine((), on())
    found = by_id(report)
    assert report.status == 1
    assert found["transport.default"].severity is Severity.PROBLEM
    assert found["verbs.devices"].severity is Severity.NOTE
    assert found["gpu.driver"].what == "no GPU and no CUDA driver is here"
    assert found["network.interfaces"].severity is Severity.NOTE


def test_an_rdma_transport_that_was_asked_for_makes_missing_devices_a_problem(on: Callable[..., FakeHost]) -> None:
    report = examine.examine(("cx7",), on())
    found = by_id(report)
    assert report.status == 3
    assert found["transport.cx7"].severity is Severity.PROBLEM
    assert found["verbs.devices"].severity is Severity.PROBLEM
    assert found["verbs.library"].severity is Severity.PROBLEM


def test_looks_that_take_too_long_are_unknown_and_prove_nothing(on: Callable[..., FakeHost]) -> None:
    host = on()

    def never(*arguments: str) -> dict[str, Any]:
        raise ChildTimedOut("unknown: took longer than 30 s")

    host.child = never  # type: ignore[method-assign]
    report = examine.examine((), host)
    found = by_id(report)
    assert report.status == 0
    for name in ("libfabric.library", "transport.sim", "transport.tcp", "gpu.driver", "settings.engine"):
        assert "unknown: took longer than 30 s" in found[name].what
    assert found["transport.default"].severity is Severity.WARNING
    texts = " ".join(f"{finding.what} {finding.consequence} {finding.remedy}" for finding in found.values())
    for wrong in ("does not work here", "install libfabric", "does not start", "no transport but"):
        assert wrong not in texts
    assert examine.examine(("tcp",), host).status == 3


def test_the_last_line_names_the_worst(on: Callable[..., FakeHost]) -> None:
    out = io.StringIO()
    show(Console(file=out, width=120), examine.examine((), on()))
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("1 problem, ")
    assert last.endswith("Transports: no transport but the simulated one works here")


CUDA = {
    "version": "13.0",
    "devices": [{"index": i, "name": "NVIDIA H200", "dma_buf": 1, "fabric_handles": 1} for i in range(8)],
}


def test_a_machine_with_everything_is_fine(on: Callable[..., FakeHost]) -> None:
    host = on(standard(8), cuda=CUDA)
    host.libraries = {"libibverbs.so.1", "libgdrapi.so.2"}
    put(host.path("/dev/gdrdrv"), "")
    for index in range(8):
        gids = [Gid("fe80::1", V2, "ens1"), ZERO, Gid(f"::ffff:10.1.0.{index}", V2, "ens1")]
        write_port(host.root, f"mlx5_{index}", gids=gids)
    put(host.path("/sys/class/net/ens1/mtu"), 9000)
    found = by_id(examine.examine((), host))
    for name in ("verbs.library", "verbs.devices", "verbs.access.mlx5_3", "verbs.port.mlx5_3.1", "gpu.driver",
                 "gpu.devices", "gpu.peer_memory", "gpu.gdrcopy", "topology.nics"):  # fmt: skip
        assert found[name].severity is Severity.OK, found[name]
    port = found["verbs.port.mlx5_3.1"]
    assert port.what == (
        "mlx5_3:1: ACTIVE, Ethernet, 400 Gb/sec (4X NDR), GID 2 is ::ffff:10.1.0.3 of ens1 "
        "(RoCE v2, IPv4-mapped, best of 2)"
    )
    assert (port.facts["gid_index"], port.facts["interface_mtu"], port.facts["unusable"]) == (2, 9000, None)
    assert [(gid["index"], gid["gid"], gid["type"], gid["interface"]) for gid in port.facts["gids"]] == [
        ("0", "fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2", "ens1"),
        ("2", "0000:0000:0000:0000:0000:ffff:0a01:0003", "RoCE v2", "ens1"),
    ]


def test_devices_that_the_container_hides_are_named(on: Callable[..., FakeHost]) -> None:
    host = on(Machine([Branch([gpu(), nic(0, CONNECTX7, hidden=True)], 0)]), cuda=CUDA)
    put(host.path("/.dockerenv"), "")
    finding = by_id(examine.examine((), host))["verbs.devices"]
    assert finding.severity is Severity.WARNING
    assert "0001:04:00.0" in finding.what
    assert "/dev/infiniband" in finding.remedy


def test_a_device_file_that_is_missing_and_a_port_that_is_down_are_warnings(on: Callable[..., FakeHost]) -> None:
    host = on(Machine([Branch([nic(0), nic(1, active=False)], 0)]))
    host.path("/dev/infiniband/uverbs0").unlink()
    found = by_id(examine.examine((), host))
    assert found["verbs.access.mlx5_0"].severity is Severity.WARNING
    assert found["verbs.port.mlx5_1.1"].severity is Severity.WARNING
    assert "DOWN" in found["verbs.port.mlx5_1.1"].what


def port_finding(host: FakeHost, *gids: Gid, mtu: int = 9000, **more: Any) -> Finding:
    write_port(host.root, "mlx5_0", gids=gids, **more)
    put(host.path("/sys/class/net/eth0/mtu"), mtu)
    return by_id(examine.examine((), host))["verbs.port.mlx5_0.1"]


def test_roce_without_a_v2_gid_is_a_warning(on: Callable[..., FakeHost]) -> None:
    finding = port_finding(on(), Gid("fe80::1", V1))
    assert finding.severity is Severity.WARNING
    assert "RoCE v2" in finding.consequence
    assert "give eth0 an IPv4 address" in finding.remedy


def test_a_link_local_gid_alone_is_a_note(on: Callable[..., FakeHost]) -> None:
    finding = port_finding(on(), Gid("fe80::1", V2))
    assert finding.severity is Severity.NOTE
    assert "same Ethernet segment" in finding.consequence


@pytest.mark.parametrize(("mtu", "size"), [(1500, 1024), (4191, 2048), (4192, None), (100, 256)])
def test_an_interface_with_small_packets_is_a_note(on: Callable[..., FakeHost], mtu: int, size: int | None) -> None:
    finding = port_finding(on(), Gid("::ffff:10.0.0.1"), mtu=mtu)
    assert (finding.severity is Severity.OK) is (size is None)
    assert size is None or f"at most {size} bytes" in finding.consequence


def test_ports_that_cannot_be_used_say_why_and_what_to_do(on: Callable[..., FakeHost]) -> None:
    finding = port_finding(on(), state="1: DOWN", physical="3: Disabled", parent="eth0")
    assert finding.severity is Severity.WARNING
    assert finding.what.endswith("the port is DOWN (Disabled)")
    assert "ip link set eth0 up" in finding.remedy
    finding = port_finding(on(), Gid("fe80::1", V1), layer="InfiniBand", lid=0)
    assert "no subnet manager" in finding.what
    assert "opensm" in finding.remedy


def test_an_infiniband_port_shows_its_lid(on: Callable[..., FakeHost]) -> None:
    finding = port_finding(on(), Gid("fe80::1", V1, None), layer="InfiniBand", lid=9)
    assert finding.severity is Severity.OK
    assert "LID 9, GID 0 is fe80::1 (InfiniBand, index 0)" in finding.what


def test_the_variable_of_the_gid_index_counts_and_is_named_when_it_leads_nowhere(on: Callable[..., FakeHost]) -> None:
    gids = (Gid("fe80::1", V1), Gid("::ffff:10.0.0.1"))
    for value, index in (("0", 0), ("0x1", 1), ("", 1), ("many", 1)):
        host = on()
        host.environment = {"TE_GID_INDEX": value}
        assert port_finding(host, *gids).facts["gid_index"] == index
    host = on()
    host.environment = {"TE_GID_INDEX": "0"}
    assert "unset TE_GID_INDEX" in port_finding(host, *gids).remedy
    host.environment = {"TE_GID_INDEX": "5"}
    finding = port_finding(host, *gids)
    assert finding.severity is Severity.WARNING
    assert "gid_index is 5" in finding.what
    assert finding.remedy == "set one of those that are filled: 0-1"


def test_an_efa_port_is_fine_and_not_for_cx7(on: Callable[..., FakeHost]) -> None:
    finding = by_id(examine.examine((), on(Machine([Branch([nic(0, EFA)], 0)]))))["verbs.port.rdmap0s0.1"]
    assert finding.severity is Severity.OK
    assert "not for cx7: an EFA device" in finding.what


def test_little_locked_memory_matters_with_rdma_alone(on: Callable[..., FakeHost]) -> None:
    for machine, severity in ((None, Severity.NOTE), (Machine([Branch([nic(0)], 0)]), Severity.WARNING)):
        host = on(machine)
        host.limits[resource.RLIMIT_MEMLOCK] = 65536
        finding = by_id(examine.examine((), host))["memory.memlock"]
        assert finding.severity is severity
        assert "64 KiB" in finding.what


def test_root_with_the_capability_may_lock_beyond_the_limit(on: Callable[..., FakeHost]) -> None:
    host = on()
    host.root_user = True
    host.limits[resource.RLIMIT_MEMLOCK] = 65536
    put(host.path("/proc/self/status"), "CapEff:\t0000000000004000")
    assert by_id(examine.examine((), host))["memory.memlock"].severity is Severity.OK
    put(host.path("/proc/self/status"), "CapEff:\t0000000000000000")
    assert by_id(examine.examine((), host))["memory.memlock"].severity is Severity.NOTE


def test_a_small_quota_is_a_warning(on: Callable[..., FakeHost]) -> None:
    host = on()
    put(host.path("/proc/self/cgroup"), "0::/")
    put(host.path("/sys/fs/cgroup/cpu.max"), "150000 100000")
    finding = by_id(examine.examine((), host))["cpu.quota"]
    assert finding.severity is Severity.WARNING
    assert "1.5 CPUs" in finding.what


def test_a_small_shared_memory_is_a_warning(on: Callable[..., FakeHost], monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_blocks, f_bavail, f_frsize = 16384, 16000, 4096

    monkeypatch.setattr(limits.os, "statvfs", lambda _path: Small)
    finding = by_id(examine.examine((), on()))["memory.shm"]
    assert finding.severity is Severity.WARNING
    assert "Docker's default" in finding.what


def test_forbidden_cross_memory_is_explained(on: Callable[..., FakeHost]) -> None:
    host = on(read_from={"errno": 1})
    put(host.path("/proc/sys/kernel/yama/ptrace_scope"), "2")
    finding = by_id(examine.examine((), host))["memory.cross_memory"]
    assert (finding.facts["errno"], finding.facts["ptrace_scope"]) == ("EPERM", 2)
    assert "ptrace_scope is 2" in finding.what


def test_a_library_that_crashes_is_a_finding(on: Callable[..., FakeHost]) -> None:
    crash = ChildFailed("it ended by signal 6: assertion failed")
    found = by_id(examine.examine((), on(standard(8), libfabric=crash, cuda=crash, read_from=crash)))
    assert "signal 6" in found["libfabric.library"].what
    assert "signal 6" in found["gpu.driver"].what
    assert found["memory.cross_memory"].severity is Severity.NOTE


def test_a_driver_that_does_not_start_is_a_warning(on: Callable[..., FakeHost]) -> None:
    answer = {"version": "13.0", "devices": [], "failed": "cuInit: unknown error (999)"}
    finding = by_id(examine.examine((), on(standard(8), cuda=answer)))["gpu.driver"]
    assert finding.severity is Severity.WARNING
    assert "999" in finding.what


def test_mistyped_and_wrong_settings_are_named(on: Callable[..., FakeHost]) -> None:
    host = on()
    host.environment = {"TE_POLING": "busy", "TE_OPERATIONS": "17", "TE_NICS": "lo", "TE_UNRELATED_THING": "1"}
    found = by_id(examine.examine((), host))
    assert "TE_POLLING" in found["settings.TE_POLING"].remedy
    assert "power of two" in found["settings.TE_OPERATIONS"].what
    assert not {"settings.TE_NICS", "settings.TE_UNRELATED_THING"} & set(found)


def test_a_look_that_fails_becomes_a_finding(on: Callable[..., FakeHost], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object, **_more: object) -> list[Finding]:
        raise ZeroDivisionError("by design")

    for module in (examine.transports, examine.rdma, examine.gpus, examine.limits, examine.places):
        monkeypatch.setattr(module, "look", broken)
    report = examine.examine(("tcp",), on())
    assert sum("ZeroDivisionError: by design" in finding.what for finding in report.findings) == 5
    assert report.status == 3, "what was asked for is not known to work"


@pytest.fixture
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], FakeHost]]:
    """A machine all of whose small files hold the same bytes."""

    def make(content: bytes) -> FakeHost:
        root = tmp_path_factory.mktemp("noise")
        write_tree(Machine([Branch([gpu(), nic(0)], 0)], packages=1, cores=1, smt=1), root)
        (root / "dev/shm").mkdir(parents=True)
        for name in (
            "proc/self/cgroup", "proc/self/status", "sys/fs/cgroup/cpu.max", "sys/class/net/x/mtu",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "proc/sys/kernel/yama/ptrace_scope",
        ):  # fmt: skip
            put(root / name, "")
        for path in root.rglob("*"):
            if path.is_file():
                path.write_bytes(content)
        return FakeHost(root)

    return make


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40))
def test_no_content_of_files_raises(noisy: Callable[[bytes], FakeHost], content: bytes) -> None:
    report = examine.examine((), noisy(content))
    assert not [finding for finding in report.findings if "could not be looked at" in finding.what]
