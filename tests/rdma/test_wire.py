"""Two guests on a wire are two hosts: what one sends arrives at the other."""

from __future__ import annotations

import shlex
import sysconfig
from pathlib import Path

import pytest

from .launch import SLOW_ENGINES, Wire

COMMAND = Path(sysconfig.get_path("scripts")) / "transfer-engine"


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path)


def test_messages_go_between_two_hosts(wire) -> None:
    # Few and short ones: its acknowledgements are waited for less long than an emulated processor may take.
    pingpong = "ibv_rc_pingpong --ib-dev rxe0 --gid-idx 1 --mtu 4096 --size 4096 --iters 20 --chk"
    with wire.run(0, f"stdbuf -oL {pingpong}") as server:
        assert server.stdout is not None
        assert "GID ::ffff:10.77.0.1" in server.stdout.readline()
        with wire.run(1, f"{pingpong} 10.77.0.1") as client:
            said = client.communicate()
            assert client.returncode == 0, said
            assert "20 iters" in said[0]
        out, err = server.communicate()
        assert server.returncode == 0, (out, err)
        assert "GID ::ffff:10.77.1.1" in out


def test_the_command_line_finds_every_byte_right_between_two_hosts(wire) -> None:
    program = " ".join(["env", *(f"{name}={value}" for name, value in SLOW_ENGINES.items()), str(COMMAND)])
    with wire.run(0, f"{program} serve --transport cx7") as server:
        assert server.stdout is not None
        name, verb, address = shlex.split(server.stdout.readline())
        assert (name, verb) == ("transfer-engine", "loopback")
        loopback = f"{program} loopback {address} --quick --max-size 70000 --timeout 100"
        bench = f"{program} bench {address} --max-size 4096 --depth 4 --seconds 0.02 --timeout 100"
        with wire.run(1, f"{loopback} && {bench}") as client:
            out, err = client.communicate()
            assert client.returncode == 0, out + err
        assert out.count("every byte right") == 2, out
        assert "B/s" in out
        server.terminate()
        _, err = server.communicate()
        assert err.count("client served") == 2, err
