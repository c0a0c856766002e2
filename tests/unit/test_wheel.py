"""The wheel: what is in it, what it needs, and what it shows."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a C++ program on Linux has anyway. Everything else is loaded at run time, if it is there.
EVERYWHERE = {
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    found = list((ROOT / "dist").glob("*.whl"))
    assert len(found) == 1, f"one wheel expected in dist/, found {found}: run `make wheel`"
    return zipfile.ZipFile(found[0])


@pytest.fixture(scope="module")
def extension(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    [name] = [name for name in wheel.namelist() if name.endswith(".so")]
    return Path(wheel.extract(name, tmp_path_factory.mktemp("wheel")))


def readelf(*arguments: str) -> str:
    if shutil.which("readelf") is None:
        pytest.fail("readelf is missing: it comes with the compiler (binutils)")
    return subprocess.run(["readelf", "--wide", *arguments], capture_output=True, text=True, check=True).stdout


def test_it_is_one_wheel_for_the_stable_abi(wheel: zipfile.ZipFile) -> None:
    assert re.search(r"-cp310-abi3-\w+\.whl$", str(wheel.filename))
    [extension] = [name for name in wheel.namelist() if name.endswith(".so")]
    assert extension.endswith(".abi3.so")


def test_its_record_lists_the_package_and_its_metadata_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    [record] = [name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")]
    rows = list(csv.reader(wheel.read(record).decode().splitlines()))
    listed = {row[0] for row in rows}
    assert listed == set(wheel.namelist())
    assert {name.split("/")[0].split("-")[0] for name in listed} == {"transfer_engine"}
    for name, digest, size in rows:
        if name != record:
            data = wheel.read(name)
            assert len(data) == int(size)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert "transfer_engine/py.typed" in listed
    assert {"transfer_engine/kernels/transfer_engine.cuh", "transfer_engine/kernels/waits.cu"} <= listed
    strays = [name for name in listed if name.endswith((".cc", ".h", ".sh", ".o", ".a", ".pyc", ".txt"))]
    assert [name for name in strays if not name.endswith("entry_points.txt")] == []


def test_it_needs_no_library_that_a_bare_machine_lacks(extension: Path) -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic", str(extension))))
    assert needed <= EVERYWHERE


def test_it_shows_its_entry_point_and_nothing_else(extension: Path) -> None:
    lines = readelf("--dyn-syms", str(extension)).splitlines()
    shown = {fields[7].split("@")[0] for fields in map(str.split, lines) if len(fields) > 7 and fields[6].isdecimal()}
    assert {name for name in shown if name not in ("Name",)} == {"PyInit__core"}


def test_it_runs_doctor_and_the_simulated_fabric_where_nothing_else_is(tmp_path: Path) -> None:
    environment = {
        "HOME": str(tmp_path), "PATH": str(tmp_path), "TE_LIBFABRIC": "/nonexistent", "TE_HWLOC": "/nonexistent",
    }  # fmt: skip
    code = (
        "import sys, transfer_engine as te\n"
        "with te.Engine('sim') as a, te.Engine('sim') as b:\n"
        "    target = bytearray(4)\n"
        "    a.write(a.register(bytearray(b'four')), b.register(target).descriptor, flush=True).wait(10)\n"
        "    assert target == b'four'\n"
        "try:\n"
        "    te.Engine('tcp')\n"
        "except te.TransportUnavailable as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "/nonexistent" in done.stdout
    command = Path(sys.executable).with_name("transfer-engine")
    done = subprocess.run([command, "doctor"], env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "libfabric" in done.stdout
