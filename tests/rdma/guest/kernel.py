"""The kernel that the guest boots: the one of this Debian release, unpacked into a cache folder, never installed."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ["linux-image-amd64", "busybox-static"]  # not -cloud-amd64: it has neither rdma_rxe nor 9p
NEEDED = ["rdma_rxe", "9p", "sch_netem"]
PATIENCE_S = 300
# What a compressed kernel or module begins with, and the program that unpacks it.
COMPRESSED = {b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Unavailable(Exception):
    """The guest could not be prepared or did not work; says what failed."""


@dataclass(frozen=True)
class Kernel:
    """Unpacked packages.

    Attributes:
        root: the folder they are unpacked in.
        version: as `uname -r` has it.
    """

    root: Path
    version: str

    @property
    def image(self) -> Path:
        return self.root / "vmlinux"

    @property
    def modules(self) -> Path:
        return self.root / "usr/lib/modules" / self.version

    @property
    def busybox(self) -> Path:
        return self.root / "busybox"

    def load_order(self, modules: list[str]) -> list[Path]:
        """The files of these modules and of what they depend on, which comes first."""
        said = call(
            "modprobe", "-C", "/dev/null", "-d", self.root, "-S", self.version, "-a", "--show-depends", *modules
        )
        return [Path(file) for file in dict.fromkeys(re.findall(r"^insmod (\S+)", said, re.M))]


def call(*command: str | Path, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed."""
    name = " ".join(map(str, command[:2]))
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except FileNotFoundError:
        raise Unavailable(f"the program {command[0]} is missing: run tools/setup.sh rdma") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{name} did not end within {PATIENCE_S} s") from None
    if done.returncode:
        raise Unavailable(f"{name} failed:\n{(done.stdout + done.stderr)[-2000:].strip()}")
    return done.stdout


def unpacked(data: bytes) -> bytes:
    for magic, program in COMPRESSED.items():
        if data.startswith(magic):
            try:
                return subprocess.run([program, "-dc"], input=data, capture_output=True, check=True).stdout
            except FileNotFoundError:
                raise Unavailable(f"the program {program} is missing: run tools/setup.sh rdma") from None
    return data


def elf_image(boot_image: bytes) -> bytes:
    """The kernel inside of a bzImage: what is unpacked here needs not be unpacked by an emulated processor.

    Offsets are those of the x86 boot protocol; the length of what is unpacked, four bytes, follows the payload.
    """
    (setup_sectors,) = struct.unpack_from("<B", boot_image, 0x1F1)
    offset, length = struct.unpack_from("<II", boot_image, 0x248)
    begin = (setup_sectors + 1) * 512 + offset
    elf = unpacked(boot_image[begin : begin + length - 4])
    if not elf.startswith(b"\x7fELF"):
        raise Unavailable("this kernel image is compressed in a way that is not known here")
    return elf


def download(folder: Path) -> None:
    """Fetches the packages and those that hold parts of the kernel, whose names bear its version."""
    said = call("apt-cache", "depends", "--recurse", "--important", *PACKAGES)
    names = sorted(set(re.findall(r"^(linux-(?:image|modules|binary)-\d\S+|busybox-static)$", said, re.M)))
    if len(names) < len(PACKAGES):
        raise Unavailable(f"apt knows no {' or no '.join(PACKAGES)}")
    call("apt-get", "download", *names, cwd=folder)


def fetch(folder: Path) -> None:
    """Fills an empty folder."""
    try:
        download(folder)
    except Unavailable as failed:
        if os.geteuid() != 0:
            raise Unavailable(f"{failed}\nrun as root: apt-get update; then try again") from None
        call("apt-get", "update")  # the lists may be absent, or older than what the server has
        download(folder)
    for package in folder.glob("*.deb"):
        call("dpkg-deb", "-x", package, folder)
        package.unlink()
    if (folder / "lib").is_dir():
        shutil.copytree(folder / "lib", folder / "usr/lib", dirs_exist_ok=True, copy_function=os.rename)
        shutil.rmtree(folder / "lib")
    (folder / "lib").symlink_to("usr/lib")
    modules = folder / "usr/lib/modules"
    (version,) = (path.name for path in modules.iterdir())
    for name in NEEDED:
        if not any(modules.rglob(f"{name}.ko*")):
            raise Unavailable(f"the kernel {version} has no module {name}")
    call("depmod", "-b", folder, version)
    (folder / "vmlinux").write_bytes(elf_image((folder / f"boot/vmlinuz-{version}").read_bytes()))
    (busybox,) = (path for name in ("bin", "usr/bin") for path in (folder / name).glob("busybox"))
    busybox.rename(folder / "busybox")


def cached() -> Kernel:
    """The kernel of this release, fetched if it is not there. Remove the folder to have it fetched again."""
    if platform.machine() != "x86_64":
        raise Unavailable("the guest runs this machine's programs under an emulated x86-64 processor: x86-64 only")
    release = platform.freedesktop_os_release()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transfer_engine/guest"
    folder = cache / release.get("VERSION_CODENAME", release["ID"])
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                fetch(partial)
            except Unavailable as failed:
                raise Unavailable(f"cannot fetch {' and '.join(PACKAGES)} with apt: {failed}") from None
            partial.rename(folder)
    return Kernel(folder, next((folder / "usr/lib/modules").iterdir()).name)
