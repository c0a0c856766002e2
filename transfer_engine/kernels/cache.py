"""Compiled kernels on disk. Nothing here can fail: what cannot be read is compiled, what cannot be written is not kept.

An entry is a file named by the digest of all that decides what is in it: `_MAGIC`, the SHA-256 of the rest, the rest.
Writers make a file of their own and rename it, so readers see whole entries, and the last of several writers wins with
the same content.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

_MAGIC = b"te kernel 1\n"
_DIGEST_BYTES = 32

_log = logging.getLogger("transfer_engine")


def folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Where entries lie: $TE_KERNEL_CACHE, else below $XDG_CACHE_HOME, else below ~/.cache. None: there is no home."""
    environment = os.environ if environment is None else environment
    if environment.get("TE_KERNEL_CACHE"):
        return Path(environment["TE_KERNEL_CACHE"])
    base = environment.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():  # the specification ignores relative ones
        return Path(base) / "transfer_engine" / "kernels"
    try:
        return Path.home() / ".cache" / "transfer_engine" / "kernels"
    except RuntimeError:
        return None


def key(*parts: str | bytes) -> str:
    """The digest of all parts and of where each of them ends."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def read(name: str) -> bytes | None:
    """An entry's content; None: there is none, or it is damaged."""
    at = folder()
    if at is None:
        return None
    try:
        data = (at / name).read_bytes()
    except OSError:
        return None
    body = data[len(_MAGIC) + _DIGEST_BYTES :]
    if data == _MAGIC + hashlib.sha256(body).digest() + body:
        return body
    _log.warning("kernel cache: %s is damaged and is made anew", at / name)
    return None


def write(name: str, body: bytes) -> None:
    """Keeps an entry, where that is possible."""
    at = folder()
    if at is None:
        return
    temporary = None
    try:
        at.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=at, prefix=f".{name[:16]}-", delete=False) as file:
            temporary = Path(file.name)
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        temporary.replace(at / name)
    except OSError as cause:
        _log.info("kernel cache: %s cannot be written, kernels are compiled in each process: %s", at, cause)
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
