"""Engine: the set-up, the life cycle, and everything that is made from an engine. The data path is in datapath.py."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from . import _native, messages, peers, probing, stats
from ._handle import CLOSED, FORKED, EngineHandle
from ._native import ffi, lib, thread_state
from .address import Address
from .counters import Counter
from .datapath import Datapath
from .dispatcher import Dispatcher
from .errors import ArgumentTypeError, ConfigError, TransferEngineError, refuse_callback, refuse_pickle
from .flags import Flag
from .memory import Buffer, Region
from .messages import Message, Messages
from .pages import PageWrite, Scatter, Write
from .peers import Peer, PeerName
from .prepared import Prepared
from .settings import Settings, to_native
from .spans import parse_device, span_of
from .transfers import Transfer
from .watchers import Watcher

if TYPE_CHECKING:
    from .groups import PeerGroup

_JOIN_S = 5.0  # how long close() waits for a callback that is running

_log = logging.getLogger("transfer_engine")


class Engine(Datapath):
    """Moves bytes between the memories of this process and of its peers. A context manager.

    Args:
        transport: "efa", "cx7", "tcp", "shm" or "sim"; a requested transport is used or refused, never replaced. None
            takes the setting, else the best that works here; `engine.transport` and the log say which.
        device: None: host memory, and that of any GPU. A GPU ("cuda:0", a torch.device): the NICs and the core near
            it; host memory works as well, memory of other GPUs is refused.
        nics: names of interfaces or devices (a list, or with commas between them), or how many to use. None takes the
            setting, else what the topology gives.
        settings: all else; None reads the environment (TE_...) and takes defaults.

    Raises:
        TransportUnavailable: the transport's library, provider or device is missing.
        ConfigError: a setting that cannot be honoured here.
        ArgumentTypeError: arguments of other types.
    """

    __slots__ = ("__weakref__", "_address", "_description", "_settings")

    def __init__(
        self,
        transport: str | None = None,
        device: Any = None,
        nics: str | int | Sequence[str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        if settings is not None and not isinstance(settings, Settings):
            raise ArgumentTypeError(f"settings must be te.Settings, not {type(settings).__name__}", operation="Engine")
        kind, index = parse_device(device)
        gpu = None if kind == lib.TE_DEVICE_HOST else index
        if gpu is not None:
            _require_gpu(gpu)
        settings = settings or Settings()
        if transport is not None:
            settings = dataclasses.replace(settings, transport=transport)
        if isinstance(nics, int):
            settings = dataclasses.replace(settings, nic_count=nics)
        elif nics is not None:
            settings = dataclasses.replace(settings, nics=nics)
        chosen = settings.transport is None
        if chosen:
            settings = dataclasses.replace(settings, transport=probing.best())
        settings = _placed(settings, gpu)
        native, alive = to_native(settings)
        try:
            self._handle = handle = EngineHandle(native, int(settings.timeout_s * 1e9))
        except ConfigError as cause:
            if "no such network interface" in cause.message:
                names = ", ".join(name for _, name in socket.if_nameindex())
                cause.hint = f"nics, or TE_NICS, takes interfaces of this host ({names}) or their addresses"
            raise
        del alive  # the core has copied what it needs
        handle.device = gpu
        _engines.add(self)
        self._settings = settings
        self._description = stats.describe(handle)
        handle.nic_names = tuple(stats.nic(handle, index)["name"] for index in range(self._description["nics"]))
        native_address = ffi.new("te_address *")
        error = thread_state.error
        status = lib.te_engine_address(handle.pointer, native_address, error)
        if status != _native.OK:
            raise handle.failure("Engine", status, error)
        self._address = Address.from_native(native_address)
        _log.log(
            logging.INFO if chosen else logging.DEBUG,
            "engine on %s (%s, %s), nics %s",
            self.transport, self._description["provider"], self._description["library"], ", ".join(self.nics),
        )  # fmt: skip

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def address(self) -> Address:
        """All that another engine needs in order to reach this one."""
        return self._address

    @property
    def transport(self) -> str:
        """The transport in use."""
        return str(self._description["transport"])

    @property
    def nics(self) -> tuple[str, ...]:
        """The names of the NICs in use, in the order of their indices."""
        return self._handle.nic_names

    @property
    def settings(self) -> Settings:
        """The settings in use."""
        return self._settings

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return self._handle.state != 0

    def describe(self) -> dict[str, Any]:
        """What was chosen (provider, library, polling, core, ...) and what the transport can do."""
        return dict(self._description)

    def stats(self) -> dict[str, Any]:
        """Operations, bytes, errors and depths: {"engine": ..., "nics": {name: ...}, "peers": {address: ...}}.

        Counts are since the start. Plain types only: `json.dumps` takes it as it is.
        """
        self._handle.ensure_open("stats")
        return stats.collect(self._handle, self._settings.max_peers)

    # --- memory and counters ----------------------------------------------------------------------------------------

    def register(self, memory: Any, *, staging: bool = False) -> Region:
        """Registers memory that exists, without a copy, and holds a reference to it until the region is closed.

        Args:
            memory: contiguous: a numpy array, a torch tensor, anything with a buffer, `__cuda_array_interface__` or
                DLPack interface, or (pointer, nbytes, device). Read-only memory can be a source only. Any alignment and
                length, zero included. Streams are not synchronised: what a transfer reads must have been written.
            staging: GPU memory goes through pinned slots on this side, a copy by the GPU each way, which works on
                every transport. Without effect for host memory.

        Raises:
            RegistrationError: not contiguous; managed, freed or another engine's GPU memory; or memory that this
                transport does not reach. The message says which, and what to do.
            ArgumentTypeError: an object without memory.
        """
        return Region(self._handle, span_of(memory), staging)

    def allocate(self, nbytes: int, device: Any = None) -> Buffer:
        """Allocates and registers zeroed memory that starts on a page boundary.

        Args:
            nbytes: its length in bytes.
            device: None or "cpu"; or a GPU ("cuda:0", a torch.device): pinned host memory that both the GPU and every
                transport reach.

        Raises:
            RegistrationError: no such memory to be had, or no such GPU.
        """
        return Buffer(self._handle, nbytes, device)

    def counter(self) -> Counter:
        """A new counter at zero, for peers to raise.

        Raises:
            ResourceExhausted: all ids are in use.
        """
        return Counter(self._handle)

    def prepare(self, operation: Write | PageWrite | Scatter) -> Prepared:
        """Checks an operation and copies what describes it, once: `prepared.post()` then starts it, as often as wanted.

        Args:
            operation: what to do. Index and offset arrays are copied now; the bytes are read at each post.

        Raises:
            TransferEngineError: as for `write`, `write_pages` and `target.scatter`.
            ResourceExhausted: too many are prepared.
        """
        return Prepared(self._handle, operation)

    # --- GPU coordination -------------------------------------------------------------------------------------------

    def flag(self, device: Any = None) -> Flag:
        """A new epoch at zero, for kernels of a device to wait for, or for threads of the host.

        Args:
            device: "cuda:<index>" or a torch.device; None is the host, where all else is the same.

        Raises:
            TransportUnavailable: no CUDA driver or no such device, or with `gdr="require"` no GDRCopy; says what lacks.
            ResourceExhausted: too many flags are open, or there is no memory for more.
        """
        return Flag(self._handle, device)

    def watcher(self, device: Any = None) -> Watcher:
        """A new word at zero, for kernels of a device to raise, or for threads of the host.

        Arguments and errors as for `flag`.
        """
        return Watcher(self._handle, device)

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(
        self,
        address: Address | bytes | str,
        data: bytes | bytearray | memoryview,
        *,
        timeout_s: float | None = None,
        request_id: object = None,
    ) -> Transfer:
        """Sends a message of at most `settings.max_message_bytes`; messages of one sender arrive in order.

        The data are copied during the call.

        Raises:
            ArgumentError: the message is too long.
            ArgumentTypeError: no bytes, or not contiguous.
            PeerError: the peer is gone. (Not reachable at all: the transfer's error.)
        """
        return messages.send(self._handle, Address.of(address), data, timeout_s, request_id)

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message from any peer.

        Args:
            timeout_s: seconds; None is the engine's default deadline, 0 only takes what is there.

        Raises:
            TransferTimeout: no message came.
        """
        return messages.receive(self._handle, timeout_s)

    def messages(self) -> Messages:
        """`async for message in engine.messages()`, on asyncio or trio; ends when the engine closes."""
        self._handle.ensure_open("messages")
        return Messages(self._handle)

    # --- peers ------------------------------------------------------------------------------------------------------

    def connect(self, address: Address | bytes | str, *, timeout_s: float | None = None) -> Peer:
        """Starts to connect ahead of first use. Idempotent; returns at once: see `peer.wait()`."""
        self._handle.ensure_open("connect")
        parsed = Address.of(address)
        index = self._handle.peer(parsed, "connect")
        return Peer(self._handle, parsed, index, peers.connect(self._handle, index, timeout_s))

    def disconnect(self, address: Address | bytes | str, *, timeout_s: float | None = None) -> Transfer:
        """Fails what is under way to the peer and frees what it held. The transfer ends when that is done."""
        transfer = self._towards(lib.te_peer_disconnect, "disconnect", address, timeout_s)
        self._handle.forget_remotes()
        return transfer

    def fence(self, address: Address | bytes | str, *, timeout_s: float | None = None) -> Transfer:
        """For the owner of memory: the transfer ends when nothing of that peer can land here any more."""
        return self._towards(lib.te_peer_fence, "fence", address, timeout_s)

    def peer_group(
        self, members: Iterable[PeerName], *, place: int | None = None, timeout_s: float | None = None
    ) -> PeerGroup:
        """Peers that are written to together; starts to connect to all of them: see `group.wait()`.

        Args:
            members: their addresses, at most 65,536. This engine may be among them, and a peer several times.
            place: the own index among the members, which decides whom scatters reach first and over which NIC. None
                finds it by the identities of all: right wherever the same engines form the group.
            timeout_s: seconds for connecting; None is the engine's default deadline.

        Raises:
            DescriptorError, ArgumentTypeError: members that are no addresses.
            RangeError: `place` is not among the members.
            ResourceExhausted: more peers than `max_peers`.
        """
        from .groups import PeerGroup  # here: numpy comes with it

        return PeerGroup(self._handle, members, place, timeout_s)

    def on_peer_lost(self, callback: Callable[[Peer], object]) -> Callable[[], None]:
        """Calls `callback(peer)` in the dispatcher thread whenever a peer is lost. What it raises is logged.

        Returns:
            A function that ends this.

        Raises:
            ArgumentTypeError: it cannot be called.
        """
        refuse_callback(callback, "on_peer_lost")
        handle = self._handle
        handle.ensure_open("on_peer_lost")

        def lost(index: int) -> None:
            address = handle.address_of(index)
            if address is not None:
                callback(Peer(handle, address, index))

        return Dispatcher.of(handle).on_peer_lost(lost)

    def _towards(
        self, function: Any, operation: str, address: Address | bytes | str, timeout_s: float | None
    ) -> Transfer:
        handle = self._handle
        handle.ensure_open(operation)
        index = handle.peer(Address.of(address), operation)
        error = thread_state.error
        submit = partial(function, handle.pointer, index, _native.nanoseconds(timeout_s), error)
        pointer = submit() or handle.persist(submit, error, timeout_s)
        if not pointer:
            raise handle.failure(operation, error.status, error)
        return Transfer(pointer, handle, operation, None, None)

    # --- life cycle -------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Ends everything: what is under way fails with EngineClosed, peers are told, memory is let go.

        Idempotent, and allowed anywhere: in callbacks, signal handlers, `__del__` and at exit. In a forked child it
        does nothing.

        Args:
            timeout_s: seconds; None is `settings.close_timeout_s`.

        Raises:
            TransferTimeout: some peer did not confirm in time that it has let go. The engine is closed all the same;
                its memory stays referenced until the last object made from it is dropped.
        """
        error = self._close(_native.nanoseconds(timeout_s))
        if error is not None:
            raise error

    def _close(self, timeout_ns: int) -> TransferEngineError | None:
        handle = self._handle
        if handle.state in (CLOSED, FORKED):
            return None
        dispatcher = handle.dispatcher
        error = handle.close(timeout_ns)
        if dispatcher is not None:
            dispatcher.join(_JOIN_S)
        return error

    def _inject(self, command: str) -> None:
        """A test hook of the simulated fabric ("nic_down 1", "kill", ...)."""
        self._handle.ensure_open("inject")
        error = thread_state.error
        status = lib.te_engine_inject(self._handle.pointer, command.encode(), error)
        if status != _native.OK:
            raise self._handle.failure("inject", status, error)

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "send engine.address; another process opens an engine of its own")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            _close_quietly(self)  # do not hide what went wrong inside

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            _close_quietly(self)

    def __repr__(self) -> str:
        if not hasattr(self, "_address"):
            return "<te.Engine: not opened>"
        state = ("open", "closing", "closed", "of the parent process")[self._handle.state]
        return f"<te.Engine on {self.transport}, nics {', '.join(self.nics)}: {state}>"


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _require_gpu(index: int) -> None:
    out = ffi.new("te_device_info *")
    error = ffi.new("te_error *")
    _native.check(lib.te_device_describe(index, out, error), "Engine", error)


def _placed(settings: Settings, gpu: int | None) -> Settings:
    """With the NICs and the core that the topology gives, where it has a say: RDMA NICs, or processes of one node."""
    if settings.transport not in ("efa", "cx7") and "LOCAL_WORLD_SIZE" not in os.environ:
        return settings
    from .topology import place  # here: reading the topology takes longer than importing all else

    placed, assignment = place(settings, gpu=gpu)
    for message in assignment.messages if assignment is not None else ():
        _log.info("topology: %s", message)
    taken = any(engine._description["core"] == placed.core for engine in _engines if not engine.closed)
    if isinstance(placed.core, int) and placed.core != settings.core and taken:
        _log.info("core %d serves another engine of this process: the new one is not pinned", placed.core)
        placed = dataclasses.replace(placed, core="none")
    return placed


def _close_quietly(engine: Engine) -> None:
    try:
        error = engine._close(-1)
    except Exception as cause:  # noqa: BLE001 - nobody could catch it
        _log.warning("closing an engine failed: %s", cause)
    else:
        if error is not None:
            _log.warning("closing an engine failed: %s", error)


@atexit.register
def _close_all() -> None:
    for engine in list(_engines):
        _close_quietly(engine)
