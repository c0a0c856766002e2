"""The emulated machine: its initramfs, its QEMU command line, and one run of it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kernel import Kernel, Unavailable, call, unpacked

HERE = Path(__file__).resolve().parent
QEMU = "qemu-system-x86_64"
EXIT_TIMEOUT = 124  # as timeout(1) has it
# Further ones are found by modprobe in the guest.
MODULES = [
    *("virtio_pci", "virtio_console", "virtio_net", "virtio_rng", "9pnet_virtio", "9p", "overlay"),
    *("crypto-crc32", "rdma_rxe", "ib_uverbs", "rdma_ucm", "veth", "bridge", "sch_netem"),
]
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic mitigations=off nokaslr audit=0 selinux=0 apparmor=0 "
    "no_timer_check tsc=reliable random.trust_cpu=on cryptomgr.notests rcupdate.rcu_expedited=1 nowatchdog"
)


@dataclass(frozen=True)
class Guest:
    """What to boot and what to run in it. An empty command is a shell on this terminal."""

    command: list[str]
    folder: Path
    devices: int
    cpus: int
    memory_mib: int
    hugepages: int
    timeout_s: float
    shares: list[Path]
    keep_tmp: bool
    wire: Path | None
    node: int
    kvm: bool
    verbose: bool


def say(text: str) -> None:
    print(f"guest: {text}", file=sys.stderr, flush=True)


def script(guest: Guest) -> str:
    """The shell script that runs the command with this process's environment."""
    environment = {"HOME": "/root", **os.environ, "TE_RDMA_GUEST": "1"}
    lines = [f"export {key}={shlex.quote(value)}" for key, value in environment.items() if re.fullmatch(r"\w+", key)]
    lines.append(f"cd {shlex.quote(str(guest.folder))} || exit 125")
    if not guest.command:
        columns, rows = shutil.get_terminal_size()
        lines.append(f"stty rows {rows} columns {columns}")
    lines.append("exec " + shlex.join(guest.command or ["bash", "-i"]))
    return "\n".join(lines) + "\n"


def write_initramfs(file: IO[bytes], guest: Guest, kernel: Kernel) -> None:
    settings = {
        "DEVICES": guest.devices,
        "CPUS": guest.cpus,
        "NODE": guest.node,
        "WIRE": "yes" if guest.wire else "",
        "HUGEPAGES": guest.hugepages,
        "KEEP_TMP": "yes" if guest.keep_tmp else "",
        "TERMINAL": "" if guest.command else "yes",
    }
    files = {
        "bin/busybox": kernel.busybox.read_bytes(),
        "init": (HERE / "init.sh").read_bytes(),
        "guest/start.sh": (HERE / "start.sh").read_bytes(),
        "guest/settings": "".join(f"{name}={value}\n" for name, value in settings.items()).encode(),
        "guest/shares": "".join(f"{path}\n" for path in guest.shares).encode(),
        "guest/command": script(guest).encode(),
    }
    for number, path in enumerate(kernel.load_order(MODULES)):
        files[f"modules/{number:02}-{path.name.split('.')[0]}.ko"] = unpacked(path.read_bytes())
    with tempfile.TemporaryDirectory() as tree:
        for name, content in files.items():
            path = Path(tree, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o755)
        names = "\n".join(sorted(str(path.relative_to(tree)) for path in Path(tree).rglob("*")))
        archive = [str(kernel.busybox), "cpio", "-o", "-H", "newc"]
        subprocess.run(archive, cwd=tree, input=names.encode(), stdout=file, stderr=subprocess.DEVNULL, check=True)
    file.flush()


def qemu_command(guest: Guest, kernel: Kernel, initramfs: int, console: int, ports: dict[str, int]) -> list[str]:
    """Numbers are file descriptors."""
    # max without what it emulates byte by byte: then memcpy and memset take other ways.
    accelerator = ["kvm"] if guest.kvm else ["tcg,thread=multi,tb-size=512"]
    processor = ["host"] if guest.kvm else ["max,-erms,-fsrm"]
    command = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-M", "q35,usb=off,smm=off,vmport=off", "-accel", *accelerator, "-cpu", *processor]
    command += ["-m", str(guest.memory_mib), "-smp", str(guest.cpus)]
    command += ["-kernel", str(kernel.image), "-initrd", f"/dev/fd/{initramfs}", "-append", KERNEL_ARGUMENTS]
    command += ["-object", "rng-random,id=random,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=random"]
    if guest.command:
        command += ["-chardev", f"file,id=console,path=/dev/fd/{console}"]
    else:
        command += ["-chardev", "stdio,id=console,signal=off"]
    command += ["-serial", "chardev:console", "-device", "virtio-serial-pci"]
    for name, number in ports.items():
        command += ["-chardev", f"file,id={name},path=/dev/fd/{number}"]
        command += ["-device", f"virtserialport,chardev={name},name={name}"]
    folders = {"host": Path("/"), "modules": kernel.modules}
    folders.update((f"share{number}", path) for number, path in enumerate(guest.shares))
    for tag, path in folders.items():
        escaped = str(path).replace(",", ",,")
        writable = "" if tag.startswith("share") else ",readonly=on"
        command += ["-fsdev", f"local,id={tag},path={escaped},security_model=none,multidevs=remap{writable}"]
        command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    if guest.wire:
        here, there = (str(guest.wire / str(node)).replace(",", ",,") for node in (guest.node, 1 - guest.node))
        sockets = f"local.type=unix,local.path={here},remote.type=unix,remote.path={there}"
        command += ["-netdev", f"dgram,id=wire,{sockets}"]
        command += ["-device", f"virtio-net-pci,netdev=wire,mac=02:00:0a:4d:{guest.node:02x}:00,romfile="]
    else:
        command += ["-nic", "none"]
    return command


def forward(source: int, sink: IO[bytes]) -> None:
    """Copies a pipe until its other end is closed, even if nobody wants to read it any more."""
    while data := os.read(source, 65536):
        with contextlib.suppress(BrokenPipeError):
            sink.write(data)
            sink.flush()


class Status:
    """What the guest says about its command: when it began, and how it ended."""

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.ended: int | None = None

    def follow(self, source: int) -> None:
        with open(source) as lines:
            for line in lines:
                word, value = line.split()
                if word == "running":
                    say(f"running after {time.monotonic() - self.begin:.1f} s")
                elif word == "ended":
                    self.ended = int(value)


def show_end(console: IO[bytes], count: int = 40) -> None:
    console.seek(0)
    lines = console.read().decode(errors="replace").replace("\r", "").splitlines()[-count:]
    say("the end of its console:")
    print("\n".join(f"  | {line}" for line in lines), file=sys.stderr, flush=True)


def run(guest: Guest, kernel: Kernel) -> int:
    """Boots, runs the command, and gives back its exit status."""
    call(QEMU, "--version")
    begin = time.monotonic()
    status = Status(begin)
    with contextlib.ExitStack() as stack:
        initramfs, console = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        write_initramfs(initramfs, guest, kernel)
        pipes = {name: os.pipe() for name in ("out", "err", "status")}
        command = qemu_command(guest, kernel, initramfs.fileno(), console.fileno(), {n: p[1] for n, p in pipes.items()})
        if guest.verbose:
            say(shlex.join(command))
        inherited = [initramfs.fileno(), console.fileno(), *(pipe[1] for pipe in pipes.values())]
        qemu = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],  # it ends when this process is killed
            stdin=subprocess.DEVNULL if guest.command else None,
            stdout=sys.stderr if guest.command else None,
            pass_fds=inherited,
            start_new_session=bool(guest.command),
        )
        for pipe in pipes.values():
            os.close(pipe[1])
        threads = [
            threading.Thread(target=forward, args=(pipes["out"][0], sys.stdout.buffer), daemon=True),
            threading.Thread(target=forward, args=(pipes["err"][0], sys.stderr.buffer), daemon=True),
            threading.Thread(target=status.follow, args=(pipes["status"][0],), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            qemu.wait(guest.timeout_s if guest.command else None)
        except subprocess.TimeoutExpired:
            say(f"not done after {guest.timeout_s:g} s")
            show_end(console)
            return EXIT_TIMEOUT
        finally:
            qemu.kill()
            qemu.wait()
            for thread in threads:
                thread.join(10)
        if guest.verbose or status.ended is None:
            show_end(console)
        if status.ended is None:
            raise Unavailable(f"it ended by itself (QEMU with {qemu.returncode})")
        say(f"ended with {status.ended} after {time.monotonic() - begin:.1f} s")
        return status.ended
