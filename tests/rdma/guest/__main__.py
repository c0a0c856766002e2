"""Runs a command with real RDMA devices on a machine that has none.

A stock Debian kernel is booted under QEMU, by software emulation, and given devices of its software implementation of
RDMA (rdma_rxe). Its root file system is that of this machine with a layer on top that is thrown away at the end: the
command finds everything where it is, and changes nothing but what lies in the folders named by --rw.

Devices are rxe0, rxe1, ... on the interfaces roce0, roce1, ... with the addresses 10.77.NODE.1, 10.77.NODE.2, ...; all
are ports (port0, port1, ...) of one bridge. Without a command there is a shell.

Exit status: that of the command; 124 if it ran out of time; 125 if the guest did not work.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import kernel
import machine

EXIT_UNAVAILABLE = 125


def parse() -> machine.Guest:
    parser = argparse.ArgumentParser(
        prog="python3 tests/rdma/guest", usage="%(prog)s [OPTION]... [--] [COMMAND]...",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--devices", type=int, default=2, metavar="N", help="RDMA devices (default 2)")
    add("--cpus", type=int, default=2, metavar="N", help="processors (default 2)")
    add("--memory", type=int, default=3072, metavar="MIB", help="memory, taken as it is used (default 3072)")
    add("--hugepages", type=int, default=64, metavar="N", help="huge pages of 2 MiB (default 64)")
    add("--timeout", type=float, default=600, metavar="S", help="seconds for all, boot included (default 600)")
    add("--chdir", type=Path, default=Path.cwd(), metavar="FOLDER", help="where the command runs (default: here)")
    add("--rw", type=Path, action="append", default=[], metavar="FOLDER", help="a folder to write to; repeatable")
    add("--keep-tmp", action="store_true", help="see this machine's /tmp, as with a folder in it")
    add("--wire", type=Path, metavar="FOLDER", help="join two guests by sockets in this folder; give each a --node")
    add("--node", type=int, choices=(0, 1), default=0, help="which of the two this is (default 0)")
    add("--kvm", action="store_true", help="use the processor's virtualisation")
    add("--verbose", action="store_true", help="show QEMU's command line and the end of the console")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    for folder in given.rw:
        if not folder.is_dir():
            parser.error(f"--rw {folder}: no such folder")
    folder = given.chdir.absolute()
    return machine.Guest(
        command=given.command[1:] if given.command[:1] == ["--"] else given.command,
        folder=folder,
        devices=given.devices,
        cpus=given.cpus,
        memory_mib=given.memory,
        hugepages=given.hugepages,
        timeout_s=given.timeout,
        shares=[folder.resolve() for folder in given.rw],
        keep_tmp=given.keep_tmp or folder.is_relative_to("/tmp"),
        wire=given.wire and given.wire.resolve(),
        node=given.node,
        kvm=given.kvm,
        verbose=given.verbose,
    )


def end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    os.environ["PATH"] = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    guest = parse()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)
    try:
        return machine.run(guest, kernel.cached())
    except kernel.Unavailable as failed:
        machine.say(str(failed))
        return EXIT_UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
