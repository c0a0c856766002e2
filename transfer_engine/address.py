"""Address: all that is needed to reach an engine, as bytes with a text form."""

from __future__ import annotations

import base64
import binascii
import socket
import struct
from typing import Any

from . import _native
from ._native import ffi, lib
from .errors import ArgumentTypeError, DescriptorError

_PREFIX = "te1:"


def nic_text(nic: Any) -> str:
    """A te_nic_address for human eyes: an IP and port, a name, or hexadecimal digits."""
    raw = bytes(ffi.buffer(nic.bytes, min(nic.length, len(nic.bytes))))
    family = struct.unpack_from("=H", raw)[0] if len(raw) >= 16 else None
    if family == socket.AF_INET and len(raw) == 16:
        return f"{socket.inet_ntop(socket.AF_INET, raw[4:8])}:{int.from_bytes(raw[2:4], 'big')}"
    if family == socket.AF_INET6 and len(raw) == 28:
        return f"[{socket.inet_ntop(socket.AF_INET6, raw[8:24])}]:{int.from_bytes(raw[2:4], 'big')}"
    name = raw.rstrip(b"\0")
    return name.decode("ascii") if name and all(32 < byte < 127 for byte in name) else raw.hex()


class Address:
    """Where an engine is reached. Immutable; compares, hashes and pickles by its bytes; `str()` gives "te1:...".

    The text form is base64url without padding: it survives shells, URLs and double clicks.
    """

    __slots__ = ("_bytes", "_native")

    def __init__(self, data: bytes) -> None:
        self._bytes = _native.foreign_bytes(data, "an address")
        self._native = _native.decode(lib.te_address_decode, "te_address", self._bytes, "Address")

    @classmethod
    def from_bytes(cls, data: bytes) -> Address:
        """The inverse of `bytes(address)`.

        Raises:
            DescriptorError: the bytes are foreign, truncated or damaged.
        """
        return cls(data)

    @classmethod
    def from_text(cls, text: str) -> Address:
        """The inverse of `str(address)`; white space around it is ignored.

        Raises:
            DescriptorError: not an address, or damaged.
            ArgumentTypeError: no text.
        """
        if not isinstance(text, str):
            raise ArgumentTypeError(f"an address's text is a str, not {type(text).__name__}", operation="Address")
        body = text.strip()
        if not body.startswith(_PREFIX):
            raise DescriptorError(f"an address starts with {_PREFIX!r}, got {body[:16]!r}", operation="Address")
        body = body[len(_PREFIX) :]
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise DescriptorError(
                "damaged address text: characters are missing, are too many, or do not belong there",
                operation="Address",
            ) from None
        if _text_of(data) != _PREFIX + body:
            raise DescriptorError("damaged address text: its last character carries stray bits", operation="Address")
        return cls(data)

    @classmethod
    def from_native(cls, native: Any) -> Address:
        """Of a te_address of the core."""
        return cls(_native.encode(lib.te_address_encode, native, "Address"))

    @classmethod
    def of(cls, value: Address | bytes | str) -> Address:
        """An address from any of its forms.

        Raises:
            DescriptorError: bytes or text that are no address.
            ArgumentTypeError: none of the forms.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.from_text(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return cls(bytes(value))
        hint = "use its attribute `address`" if hasattr(value, "address") else None
        raise ArgumentTypeError(f"expected a te.Address, its bytes or its text, not {type(value).__name__}", hint=hint)

    @property
    def identity(self) -> bytes:
        """16 bytes, random unless the engine was given an identity."""
        return bytes(ffi.buffer(self._native.identity))

    @property
    def generation(self) -> int:
        """Changes at each start of an engine, also where the identity stays."""
        return int(self._native.generation)

    @property
    def transport(self) -> str:
        """The transport on which it is reached."""
        return _native.text(self._native.transport)

    @property
    def nics(self) -> tuple[str, ...]:
        """The NICs' addresses in readable form, in the engine's order."""
        return tuple(nic_text(self._native.nics[i]) for i in range(self._native.nic_count))

    def __bytes__(self) -> bytes:
        return self._bytes

    def __str__(self) -> str:
        return _text_of(self._bytes)

    def __repr__(self) -> str:
        return f"<te.Address {self.transport} {self.identity.hex()[:8]} of {', '.join(self.nics)}>"

    def __eq__(self, other: object) -> bool:
        return self._bytes == other._bytes if isinstance(other, Address) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Address, (self._bytes,)


def _text_of(data: bytes) -> str:
    return _PREFIX + base64.urlsafe_b64encode(data).rstrip(b"=").decode()
