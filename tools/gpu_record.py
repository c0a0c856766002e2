"""What runs on a GPU leaves a record in docs/results: what ran, where, on which commit."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from transfer_engine import _cuda, kernels

TESTS, BENCH = "gpu-tests.json", "gpu-bench.json"


def kernels_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files in transfer_engine/kernels."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            content = path.read_bytes()
            digest.update(f"{path.name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def results_folder(root: Path) -> Path:
    """$TE_GPU_RESULTS, else docs/results."""
    return Path(os.environ.get("TE_GPU_RESULTS") or root / "docs" / "results")


def commit_of(root: Path) -> str:
    """$TE_COMMIT, for a copy of the tree without its history; else the commit that is checked out in `root`."""
    if named := os.environ.get("TE_COMMIT"):
        return named
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def header(root: Path, device: int = 0) -> dict[str, Any]:
    """The fields that all records have.

    Raises:
        TransportUnavailable: there is no GPU.
    """
    driver = _cuda.driver("record")
    version = int(_cuda.check(driver, "cuDriverGetVersion"))
    name = _cuda.check(driver, "cuDeviceGetName", 256, _cuda.handle_of(driver, device, "record"))
    nvrtc = _cuda.check(importlib.import_module("cuda.bindings.nvrtc"), "nvrtcVersion")
    return {
        "commit": commit_of(root),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": name.split(b"\0")[0].decode(),
        "gpus": int(_cuda.check(driver, "cuDeviceGetCount")),
        "driver": driver_version(),
        "cuda": f"{version // 1000}.{version % 1000 // 10}",
        "nvrtc": ".".join(map(str, nvrtc)),
        "kernels_sha256": kernels_digest(kernels.include_dir()),
    }


def driver_version() -> str:
    """Of NVIDIA's kernel module, as in "580.95.05"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"Kernel Module\D*?(?:for \S+)?\s+(\d+\.[\d.]+)", text)
    return found[1] if found else "unknown"


def write(root: Path, name: str, record: dict[str, Any]) -> Path:
    """Puts a record where records lie, in place of an older one."""
    folder = results_folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
    return path
