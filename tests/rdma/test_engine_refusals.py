"""What an engine is asked for and cannot have, and what strangers send it."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import transfer_engine as te
from transfer_engine._native import ffi

from ..conformance.rig import SOON_S, Rig
from . import network
from .engines import CONTROL, pair


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with pair(1) as opened:
        yield opened


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nics": ("rxe9",)}, ["rxe9", "no RDMA port has this name", "rxe0:1, rxe1:1, rxe2:1, rxe3:1"]),
        ({"nics": ("rxe0:2",)}, ["rxe0:2", "no RDMA port has this name"]),
        ({"nics": ("lo",)}, ["lo", "no RDMA port has this name, and none a GID of such an interface"]),
        ({"nics": ("rxe0", "roce0")}, ["rxe0:1", "named twice"]),
        ({"nics": ("rxe0",), "gid_index": 77}, ["rxe0", "77", "gid_index"]),
        ({"nics": ("rxe0",), "pkey_index": 99}, ["rxe0", "99", "pkey_index"]),
        ({"nic_count": 5}, ["5 NICs are wanted", "rxe0:1, rxe1:1, rxe2:1, rxe3:1", "nic_count"]),
    ],
)
def test_it_is_refused_by_name(settings, says) -> None:
    with pytest.raises(te.ConfigError) as caught:
        te.Engine(settings=te.Settings(transport="cx7", core="none", **settings))
    for words in says:
        assert words in str(caught.value)


def test_a_port_without_a_cable_is_refused_when_named_and_left_out_when_not(link_down) -> None:
    with link_down("rxe3"):
        with pytest.raises(te.ConfigError) as caught:
            te.Engine(settings=te.Settings(transport="cx7", core="none", nics=("rxe3",)))
        assert "rxe3" in str(caught.value)
        assert "DOWN" in str(caught.value)
        ports = {port.name: port for port in te.topology.rdma_ports()}
        assert ports["rxe3:1"].unusable
        assert not ports["rxe2:1"].unusable


# --- rights ----------------------------------------------------------------------------------------------------------

# As root first, so that all is loaded that is loaded late. To drop the effective user drops the capabilities with it.
UNPRIVILEGED = """
import os, resource
from pathlib import Path
import transfer_engine as te

NOBODY = 65534

def attempt(user):
    os.seteuid(user)
    try:
        with te.Engine(settings=te.Settings(transport="cx7", core="none", nics=("rxe0",), max_peers=4)) as engine:
            print("opened", end=";")
            with engine.register(bytearray(1 << 20)):
                print("registered")
    except te.TransferEngineError as error:
        print(type(error).__name__, " ".join(str(error).split()))
    finally:
        os.seteuid(0)

for device in Path("/dev/infiniband").iterdir():
    device.chmod(0o600)
attempt(0)
attempt(NOBODY)
for device in Path("/dev/infiniband").iterdir():
    device.chmod(0o666)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
attempt(NOBODY)
"""


def test_a_user_without_rights_is_told_what_is_missing() -> None:
    devices = {path: path.stat().st_mode for path in Path("/dev/infiniband").iterdir()}
    try:
        done = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, timeout=2 * SOON_S, check=False
        )
    finally:
        for path, mode in devices.items():
            path.chmod(mode)
    assert done.returncode == 0, done.stderr
    root, closed, locked = done.stdout.splitlines()
    assert root == "opened;registered"
    assert closed.startswith("TransportUnavailable")
    assert "/dev/infiniband" in closed
    assert "64 KiB of memory may be locked" in locked
    assert "ulimit -l" in locked
    assert "rxe0" in locked


# --- strangers -------------------------------------------------------------------------------------------------------


def parts_of(address: te.Address) -> tuple[int, int, str]:
    """Queue pair, queue key and GID of its first NIC (see cx7/wire.h)."""
    raw = bytes.fromhex(address.nics[0])
    pair_number, key = struct.unpack_from("<II", raw, 4)
    return pair_number, key, ":".join(raw[i : i + 2].hex() for i in range(20, 36, 2))


def test_the_address_is_that_of_the_ipv4_gid(rig) -> None:
    assert parts_of(rig.near.address)[2] == network.gids(CONTROL[0])[1]


def test_datagrams_of_strangers_are_ignored(rig, player) -> None:
    link = rig.link(5000)
    link.write(0, 0, 4000).wait(SOON_S)
    noise = random.Random(7)
    magic = struct.pack("<I", 0x51583774)
    lengths = [1, 3, 4, 40, 127, 128, 129, 1024, 4096]
    garbage = [noise.randbytes(length).hex() for length in lengths] + [bytes(length).hex() for length in lengths]
    garbage += [(magic + bytes([1, kind]) + noise.randbytes(122)).hex() for kind in (1, 2, 3, 9)] * 3
    for side in (rig.far.address(), rig.near.address):
        number, key, gid = parts_of(side)
        sent = player("throw", source="rxe1", target=gid, queue_pair=number, queue_key=key, datagrams=garbage * 5)
        assert sent == [0] * (5 * len(garbage))
    link.write(0, 1, 4000).wait(SOON_S)
    assert link.wait(2) == 2
    link.check([(0, 1, 4000)], 2)
    rig.near.disconnect(rig.far.address()).wait(SOON_S)
    link.write(0, 2, 4000).wait(SOON_S)  # the handshake works as before
    assert link.wait(3) == 3
    link.check([(0, 2, 4000)], 3)


# --- hosts that are not there ----------------------------------------------------------------------------------------


def ghost_of(address: te.Address) -> te.Address:
    """The address of an engine on a host of the same network that is off: nobody answers for its MAC address."""
    native = ffi.new("te_address *")
    ffi.memmove(native, address._native, ffi.sizeof("te_address"))
    native.identity[0] ^= 1
    native.nics[0].bytes[35] = 99  # 10.77.0.99
    return te.Address.from_native(native)


def test_a_host_that_is_off_holds_up_no_work_towards_others() -> None:
    """The kernel looks for its MAC address for seconds; the worker goes on."""
    with pair(1, connect_timeout_s=6.0) as rig:
        link = rig.link(5000)
        link.write(0, 0, 5000).wait(SOON_S)
        ghost = rig.near.connect(ghost_of(rig.far.address()))
        for i in range(1, 51):
            link.write(0, 0, 5000).wait(SOON_S)
            assert link.wait(1 + i) == 1 + i
        assert ghost.state == "connecting"
        with pytest.raises(te.PeerUnreachable):
            ghost.wait(SOON_S)
        link.write(0, 0, 5000).wait(SOON_S)
        link.check([(0, 0, 5000)])
