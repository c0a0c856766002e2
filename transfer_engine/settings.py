"""Settings: every knob of an engine in one place.

Precedence: an explicit argument, then the environment variable TE_<NAME>, then the default. The environment is read
when the object is made; afterwards every field holds the value that will be used.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._native import ffi, lib
from .errors import ArgumentTypeError, ConfigError, TransferEngineError

_UNSET: Any = object()
_MAX_SECONDS = 1e9
_LEAST_QUEUE_BYTES = 4096  # beside two of the longest messages: as the core has it

# A parser takes an explicit value or the environment's text and returns the field's value; it raises ValueError with
# the allowed range as its text, or TypeError with the expected type.
_Parser = Callable[[Any], Any]
_Given = TypeVar("_Given", contravariant=True)
_Kept = TypeVar("_Kept", covariant=True)


class _Converted(Generic[_Given, _Kept]):
    """The type of a field that takes other types than it keeps, as type checkers understand it: a descriptor."""

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: Any = None) -> _Kept: ...
        def __set__(self, instance: object, value: _Given) -> None: ...


def _integer(low: int, high: int) -> _Parser:
    def parse(value: Any) -> int:
        if isinstance(value, str):
            value = _scaled(value)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError("an integer")
        number = int(value)
        if not low <= number <= high:
            raise ValueError(f"{low} to {high}")
        return number

    return parse


def _scaled(text: str) -> int:
    """'65536', '64K', '1M', '2G' (powers of 1024)."""
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    try:
        return int(text[:-1] if shift else text, 0) << shift
    except ValueError:
        raise ValueError("an integer, with K, M or G behind it if need be") from None


def _power_of_two(low: int, high: int) -> _Parser:
    plain = _integer(low, high)

    def parse(value: Any) -> int:
        number: int = plain(value)
        if number & (number - 1):
            raise ValueError(f"a power of two from {low} to {high}")
        return number

    return parse


def _seconds(low: float, high: float = _MAX_SECONDS) -> _Parser:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise TypeError("a number of seconds")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not low <= number <= high:  # also refuses nan
            raise ValueError(f"{low:g} to {high:g} seconds")
        return number

    return parse


def _choice(*names: str) -> _Parser:
    def parse(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError("a string")
        if value not in names:
            raise ValueError("one of " + ", ".join(names))
        return value

    return parse


def _core(value: Any) -> str | int:
    if value in ("auto", "none"):
        return str(value)
    try:
        core: int = _integer(0, 4095)(value)
    except (ValueError, TypeError):
        raise ValueError("'auto', 'none' or the number of a CPU") from None
    return core


def _optional_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise TypeError("a string or None")


def _transport(value: Any) -> str | None:
    return None if value in (None, "") else str(_choice("efa", "cx7", "tcp", "shm", "sim")(value))


def _optional_integer(low: int, high: int) -> _Parser:
    plain = _integer(low, high)

    def parse(value: Any) -> int | None:
        return None if value is None or value == "" else int(plain(value))

    return parse


def _path_mtu(value: Any) -> int:
    number: int = _integer(0, 4096)(value)
    if number not in (0, 256, 512, 1024, 2048, 4096):
        raise ValueError("256, 512, 1024, 2048, 4096, or 0 for that of the port")
    return number


def _nics(value: Any) -> tuple[str, ...] | None:
    if value is None or value == "":
        return None
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError("a list of names, or names with commas between them")
    stripped = tuple(name.strip() for name in names)
    if not all(stripped) or any("," in name for name in stripped) or len(set(stripped)) != len(stripped):
        raise ValueError("distinct names, none of them empty")
    if not 1 <= len(stripped) <= lib.TE_MAX_NICS:
        raise ValueError(f"1 to {lib.TE_MAX_NICS} names")
    return stripped


def _ports(value: Any) -> tuple[int, int] | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        first, _, last = value.partition("-")
        value = (first, last or first)
    try:
        low, high = (int(port) for port in value)
    except (TypeError, ValueError):
        raise ValueError("'LOW-HIGH' or (low, high), from 1 to 65535") from None
    if not 1 <= low <= high <= 65535:
        raise ValueError("'LOW-HIGH' or (low, high), from 1 to 65535")
    return low, high


def _identity(value: Any) -> bytes | None:
    if value is None or value == "":
        return None
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else bytes(memoryview(value))
    except ValueError:
        raw = b""
    except TypeError:
        raise TypeError("16 bytes, or 32 hexadecimal digits") from None
    if len(raw) != 16 or not any(raw):
        raise ValueError("16 bytes, not all zero")
    return raw


def _setting(default: Any, parser: _Parser, meaning: str) -> Any:
    return dataclasses.field(default=_UNSET, metadata={"default": default, "parser": parser, "meaning": meaning})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of an engine; `Settings.table()` lists them with their variables, defaults and meanings.

    Raises:
        ConfigError: a value outside its range; the error names the field or variable, the value and the range.
        ArgumentTypeError: a value of the wrong type.
    """

    transport: str | None = _setting(None, _transport, "efa, cx7, tcp, shm or sim; None: the best that works here")
    nics: _Converted[str | Sequence[str] | None, tuple[str, ...] | None] = _setting(  # noqa: RUF009
        None,
        _nics,
        "names of interfaces, devices or RDMA ports (mlx5_0:1), or addresses; None: what the topology gives",
    )
    nic_count: int | None = _setting(
        None,
        _optional_integer(1, lib.TE_MAX_NICS),
        "how many NICs to use; tcp and shm can open more than there are devices; None: all named",
    )
    timeout_s: float = _setting(30.0, _seconds(1e-3), "s: deadline of transfers and waits that name none")
    connect_timeout_s: float = _setting(10.0, _seconds(1e-3), "s: until a silent address counts as unreachable")
    peer_timeout_s: float = _setting(3.0, _seconds(0.05), "s: silence after which a connected peer is lost")
    close_timeout_s: float = _setting(5.0, _seconds(1e-3), "s: how long close() waits for peers to let go")
    polling: str = _setting(
        "auto",
        _choice("auto", "busy", "adaptive"),
        "busy: the worker spins; adaptive: it sleeps when idle; auto: by core",
    )
    spin_s: float = _setting(200e-6, _seconds(0.0, 1.0), "s: adaptive polling spins this long before it sleeps")
    core: str | int = _setting("auto", _core, "CPU of the worker thread; auto: one near its NICs; none: not pinned")
    operations: int = _setting(
        4096,
        _power_of_two(16, 1 << 20),
        "operations submitted and not yet finished, all peers together; a power of two",
    )
    operations_per_peer: int = _setting(4096, _integer(1, 1 << 20), "the same towards one peer")
    nic_depth: int = _setting(0, _integer(0, 1 << 20), "work requests in flight per NIC; 0: the provider's")
    peer_depth: int = _setting(0, _integer(0, 1 << 20), "work requests in flight per NIC and peer; 0: nic_depth")
    peer_window_bytes: int = _setting(
        32 << 20,
        _integer(4096, 1 << 40),
        "bytes: in flight per NIC and peer; one work request may reach over it",
    )
    nic_window_bytes: int = _setting(256 << 20, _integer(4096, 1 << 40), "bytes: in flight per NIC, to all peers")
    immediate_window: int = _setting(256, _integer(2, 1 << 20), "notifications in flight granted to each peer and NIC")
    assembly_slots: int = _setting(32, _integer(1, 64), "slots granted to each peer for writes cut over NICs")
    message_window: int = _setting(32, _integer(4, 1024), "message fragments in flight per peer")
    max_message_bytes: int = _setting(1 << 20, _integer(1, 1 << 30), "bytes: longest message that send() takes")
    message_queue_bytes: int = _setting(
        8 << 20,
        _integer(1, 1 << 40),
        "bytes: unreceived messages held per peer; at least twice max_message_bytes, and 4096 more",
    )
    chunk_bytes: int = _setting(0, _integer(0, 1 << 40), "bytes: longest single write posted; 0: the provider's")
    shard_bytes: int = _setting(
        64 << 10, _integer(1, 1 << 40), "bytes: a write is cut over k NICs when each part has at least this much"
    )
    page_immediates: str = _setting(
        "auto",
        _choice("auto", "each", "last"),
        "which page writes notify: each, or the last of a run on an ordered queue",
    )
    max_peers: int = _setting(1024, _integer(1, 1 << 16), "peers known at one time")
    max_regions: int = _setting(1 << 16, _integer(1, 1 << 20), "regions registered here, and as many of peers")
    max_counters: int = _setting(1 << 16, _integer(1, 1 << 20), "counters open here, and as many of peers")
    staging_slots: int = _setting(
        64, _integer(2, 4096), "pinned slots for each direction through which GPU memory is staged"
    )
    staging_slot_bytes: int = _setting(
        256 << 10, _integer(4096, 64 << 20), "bytes: length of such a slot, and of a piece of a staged transfer"
    )
    ports: _Converted[str | tuple[int, int] | None, tuple[int, int] | None] = _setting(  # noqa: RUF009
        None, _ports, "lowest and highest listening port ('LOW-HIGH'); None: any"
    )
    bursts: int = _setting(64, _integer(1, 4096), "work requests posted towards one peer before others get their turn")
    gdr: str = _setting(
        "auto",
        _choice("auto", "off", "require"),
        "words in GPU memory that the CPU writes through GDRCopy: where it works, never, or an error without it",
    )
    gid_index: int | None = _setting(
        None, _optional_integer(0, 65535), "cx7: index into the GID table of every port; None: by rule (see `topo`)"
    )
    pkey_index: int = _setting(0, _integer(0, 65535), "cx7: index into the table of partition keys of every port")
    path_mtu: int = _setting(0, _path_mtu, "cx7: bytes in a packet: 256, 512, 1024, 2048, 4096; 0: that of the port")
    service_level: int = _setting(0, _integer(0, 15), "cx7: InfiniBand's service level; on Ethernet the VLAN priority")
    traffic_class: int = _setting(
        0, _integer(0, 255), "cx7: traffic class of the packets; on RoCE v2 its upper six bits are the DSCP"
    )
    ack_timeout: int = _setting(
        15,
        _integer(1, 31),
        "cx7: n: a packet that nobody acknowledges is sent again after 4.096 us x 2^n, up to four times that",
    )
    retry_count: int = _setting(7, _integer(0, 7), "cx7: how often it is sent again before the peer counts as lost")
    rnr_retry: int = _setting(7, _integer(0, 7), "cx7: the same for a peer without a posted receive; 7: without an end")
    rnr_timer: int = _setting(
        12, _integer(0, 31), "cx7: code of the wait that is asked of a peer then: 1 is 0.01 ms, 12 0.64 ms, 31 491 ms"
    )
    identity: bytes | None = _setting(
        None, _identity, "16 bytes (variable: 32 hex digits) that outlive restarts; None: random"
    )
    sim: str | None = _setting(None, _optional_text, "options of the simulated fabric, 'key=value,...'")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            name = field.name
            if value is _UNSET:
                variable = variable_of(field.name)
                value = os.environ.get(variable, _UNSET)
                name = f"environment variable {variable}"
            if value is _UNSET:
                object.__setattr__(self, field.name, field.metadata["default"])
            else:
                object.__setattr__(self, field.name, _parsed(field.metadata["parser"], value, name))
        least = 2 * self.max_message_bytes + _LEAST_QUEUE_BYTES
        if self.message_queue_bytes < least:
            raise ConfigError(
                f"message_queue_bytes is {self.message_queue_bytes}; with max_message_bytes {self.max_message_bytes} "
                f"it must be at least {least}: twice as much, and {_LEAST_QUEUE_BYTES} more",
                operation="Settings",
                hint=f"raise message_queue_bytes to {least}, or lower max_message_bytes",
            )

    @classmethod
    def check(cls, name: str, value: object) -> Any:
        """The value that the settings would have; raises as making them would, whatever the others are."""
        field = next(field for field in dataclasses.fields(cls) if field.name == name)
        return _parsed(field.metadata["parser"], value, name)

    @classmethod
    def table(cls) -> list[dict[str, Any]]:
        """One row per setting: name, variable, default, meaning. For documentation and the command line."""
        return [
            {
                "name": field.name,
                "variable": variable_of(field.name),
                "default": field.metadata["default"],
                "meaning": field.metadata["meaning"],
            }
            for field in dataclasses.fields(cls)
        ]


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"TE_{name.upper()}"


def _parsed(parser: _Parser, value: Any, name: str) -> Any:
    error: type[TransferEngineError]
    try:
        return parser(value)
    except ValueError as cause:
        allowed, error = str(cause), ConfigError
    except TypeError as cause:
        allowed, error = str(cause), ArgumentTypeError
    raise error(f"{name}: {value!r} is not allowed; allowed: {allowed}", operation="Settings")


def to_native(settings: Settings) -> tuple[Any, list[Any]]:
    """A te_settings, and what must stay alive as long as it."""
    native = ffi.new("te_settings *")
    lib.te_settings_defaults(native)
    native.struct_bytes = ffi.sizeof("te_settings")
    alive = []

    def c_string(value: str) -> Any:
        alive.append(ffi.new("char[]", value.encode()))
        return alive[-1]

    if settings.transport:
        native.transport = c_string(settings.transport)
    native.nic_count = settings.nic_count or 0
    if settings.nics:
        native.nics = c_string(",".join(settings.nics))
    if settings.sim:
        native.sim = c_string(settings.sim)
    if settings.identity:
        ffi.memmove(native.identity, settings.identity, 16)
    native.default_timeout_ns = int(settings.timeout_s * 1e9)
    for name in ("connect_timeout", "peer_timeout", "close_timeout", "spin"):
        setattr(native, f"{name}_ns", int(getattr(settings, f"{name}_s") * 1e9))
    native.polling = {"auto": lib.TE_POLL_AUTO, "busy": lib.TE_POLL_BUSY, "adaptive": lib.TE_POLL_ADAPTIVE}[
        settings.polling
    ]
    core = settings.core
    native.core = core if isinstance(core, int) else lib.TE_CORE_AUTO if core == "auto" else lib.TE_CORE_NONE
    native.page_immediates = {"auto": lib.TE_PAGES_AUTO, "each": lib.TE_PAGES_EACH, "last": lib.TE_PAGES_LAST}[
        settings.page_immediates
    ]
    native.gdr = {"auto": lib.TE_GDR_AUTO, "off": lib.TE_GDR_OFF, "require": lib.TE_GDR_REQUIRE}[settings.gdr]
    native.port_low, native.port_high = settings.ports or (0, 0)
    for name in _SAME_NAME:
        setattr(native, name, getattr(settings, name))
    native.rdma.gid_index = -1 if settings.gid_index is None else settings.gid_index
    for name in _OF_RDMA:
        setattr(native.rdma, name, getattr(settings, name))
    return native, alive


_SAME_NAME = (
    "operations", "operations_per_peer", "nic_depth", "peer_depth", "peer_window_bytes", "nic_window_bytes",
    "immediate_window", "assembly_slots", "message_window", "max_message_bytes", "message_queue_bytes", "chunk_bytes",
    "shard_bytes", "max_peers", "max_regions", "max_counters", "staging_slots", "staging_slot_bytes", "bursts",
)  # fmt: skip
_OF_RDMA = (
    "pkey_index", "path_mtu", "service_level", "traffic_class", "ack_timeout", "retry_count", "rnr_retry", "rnr_timer",
)  # fmt: skip
