"""Prepared: an operation that was checked and copied once, to be posted many times."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from . import _native
from ._handle import OPEN, EngineHandle
from ._native import ffi, lib, nanoseconds, thread_state
from .datapath import fill_pages, write_args
from .errors import ArgumentTypeError, EngineClosed, refuse_pickle
from .memory import Region, closed_here
from .pages import PageWrite, Scatter, Write
from .transfers import GroupTransfer, Transfer

if TYPE_CHECKING:
    from .targets import Target

_te_post = lib.te_post
_TRIES = 8  # the core may give up a remote handle between two calls


class Prepared:
    """A write, paged write or scatter that is ready to go. Made by `engine.prepare()`; a context manager.

    May be posted from any number of threads, also while earlier posts are under way. Dropping the object closes it.

    Attributes:
        operation: what it does ("write", "write_pages" or "scatter").
    """

    __slots__ = ("_closed", "_handle", "_id", "_region", "_target", "operation")

    def __init__(self, handle: EngineHandle, described: Write | PageWrite | Scatter) -> None:
        self._closed = True  # until it is; __del__ runs also when preparing fails
        handle.ensure_open("prepare")
        self._handle = handle
        self._target: Target | None = None
        self._region: Region
        self.operation: str
        self._id = self._prepare(described)
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once it or its engine was closed."""
        return self._closed or self._handle.state != OPEN

    def post(self, *, timeout_s: float | None = None, request_id: object = None) -> Transfer:
        """Starts the operation once more, with the source's bytes as they are now.

        Args:
            timeout_s: seconds; None is the engine's default deadline.
            request_id: kept as `transfer.request_id` and named in errors.

        Raises:
            RegionClosed: the source was closed on this side. (By a peer: the transfer's error.)
            TransferTimeout: so much is under way that this found no place before its deadline.
            EngineClosed, ForkedEngine: the engine, the target of the scatter, or this object cannot be used.
        """
        handle = self._handle
        region, target = self._region, self._target
        if handle.state or self._closed or region._closed or (target is not None and target._closed):
            self._refuse()
        error = thread_state.error
        timeout_ns = -1 if timeout_s is None else nanoseconds(timeout_s)
        pointer = _te_post(handle.pointer, self._id, timeout_ns, error)
        if not pointer:
            pointer = self._persist(timeout_ns, error, timeout_s, request_id)
        if target is None:
            return Transfer(pointer, handle, self.operation, region, request_id)
        return GroupTransfer(pointer, handle, self.operation, (region, target._count), request_id)

    def close(self) -> None:
        """Posts under way go on; new ones are refused. Idempotent."""
        handle = self._handle
        handle.ensure_native("close")
        if not self._closed and handle.state == OPEN:
            self._closed = True
            error = thread_state.error
            status = lib.te_prepared_close(handle.pointer, self._id, error)
            if status not in (_native.OK, _native.CLOSED):
                raise handle.failure("close prepared", status, error)
        self._closed = True

    # --- how --------------------------------------------------------------------------------------------------------

    def _prepare(self, described: object) -> int:
        handle = self._handle
        out = ffi.new("te_handle *")
        for _ in range(_TRIES):
            prepare, alive = self._described(described)
            error = thread_state.error
            status = prepare(out, error)
            del alive  # the core has copied what it needs
            if status == _native.OK:
                return int(out[0])
            handle.forget_remotes()
            if status != _native.STALE or (self._target is not None and self._target._closed):
                break
        raise handle.failure("prepare", status, error)

    def _described(self, described: object) -> tuple[Any, object]:
        """The call that prepares it, and what must stay alive until then."""
        handle = self._handle
        if isinstance(described, Write):
            self.operation = "write"
            args = ffi.new("te_write_args *", write_args(handle, described, "prepare"))
            self._region = described.source if isinstance(described.source, Region) else described.source.region
            return partial(lib.te_prepare_write, handle.pointer, args), None
        if isinstance(described, PageWrite):
            self.operation = "write_pages"
            args = ffi.new("te_page_args *")
            source, target = described.source, described.target
            alive: object = fill_pages(handle, args, source, target, described.notify, described.flush, "prepare")
            assert isinstance(source.region, Region), "checked there"
            self._region = source.region
            return partial(lib.te_prepare_pages, handle.pointer, args), alive
        if isinstance(described, Scatter):
            from .targets import scatter_args  # here: numpy comes with it

            self.operation = "scatter"
            args, self._region, alive = scatter_args(handle, described, "prepare")
            self._target = described.target
            return partial(lib.te_prepare_scatter, handle.pointer, args), alive
        raise ArgumentTypeError(
            f"a te.Write, te.PageWrite or te.Scatter can be prepared, not a {type(described).__name__}",
            operation="prepare",
        )

    def _persist(self, timeout_ns: int, error: Any, timeout_s: float | None, request_id: object) -> Any:
        """The first call gave no transfer: goes on if only room was missing, else raises."""
        handle = self._handle

        def again() -> Any:
            self._ensure_usable()
            return _te_post(handle.pointer, self._id, timeout_ns, error)

        pointer = handle.persist(again, error, timeout_s)
        if not pointer:
            self._ensure_usable()
            note = "" if request_id is None else f" (request {request_id!r})"
            raise handle.failure(self.operation, error.status, error, note)
        return pointer

    def _ensure_usable(self) -> None:
        closed = self._closed or self._region._closed or (self._target is not None and self._target._closed)
        if closed or self._handle.state:
            self._refuse()

    def _refuse(self) -> NoReturn:
        self._handle.ensure_open("post")
        if self._closed:
            hint = "the engine is open: make another with engine.prepare()"
            raise EngineClosed("the prepared transfer is closed", operation="post", hint=hint)
        if self._target is not None:
            self._target._ensure_open("post")
        raise closed_here(self._region, "post")

    def __enter__(self) -> Prepared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and self._handle.state == OPEN:
            self._closed = True
            lib.te_prepared_close(self._handle.pointer, self._id, ffi.new("te_error *"))

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "send what it is made of, and prepare it there")

    def __repr__(self) -> str:
        return f"<te.Prepared {self.operation}{': closed' if self.closed else ''}>"
