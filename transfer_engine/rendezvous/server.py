"""The store's server: one thread, any number of clients, over TCP.

It trusts no byte: a connection that does not greet properly within the handshake's time, sends what is no message, or
claims too great a length is closed, and the others do not notice. A connection has at most one request under way, so
nobody can make the server hold more than the store's limit and one frame for each connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from types import TracebackType

from .. import errors
from . import auth, environment, wire
from .board import Board
from .wire import Answer, Presence, Refusal, Reply, Request, WireError

_HANDSHAKE_S = 10.0
_BACKLOG = 1024
_MOST_CONNECTIONS = 1 << 16
_READ_BYTES = 1 << 18

_log = logging.getLogger("transfer_engine")


class _Connection:
    """One client. `stage`: "hello", "proof" or "open"."""

    __slots__ = (
        "challenge", "deadline", "hello", "incoming", "left", "outgoing", "proved", "seal", "socket", "stage", "unseal",
    )  # fmt: skip

    def __init__(self, accepted: socket.socket, deadline: float) -> None:
        self.socket = accepted
        self.deadline = deadline
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.stage = "hello"
        self.hello: wire.Hello | None = None
        self.challenge = b""
        self.seal: auth.Seal | None = None
        self.unseal: auth.Seal | None = None
        self.left = False
        self.proved = False  # from here on, bodies carry signatures


class StoreServer:
    """Serves a store until it is closed; a context manager.

    Args:
        host: where to listen: a numeric address, or "" for all addresses of this host.
        port: zero lets the kernel choose; `address` says which it is.
        job: the only job whose clients are let in; None: any.
        world_size: what the clients must agree to; None: anything.
        token: the cluster token; None: the environment's, b"": none.
        most_bytes: bytes: all keys and values together.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        host: str = "",
        port: int = 0,
        *,
        job: str | None = None,
        world_size: int | None = None,
        token: bytes | None = None,
        most_bytes: int = 1 << 30,
    ) -> None:
        self._token = auth.cluster_token() if token is None else token
        self._job = job
        self._world_size = world_size
        self._board: Board[_Connection] = Board(most_bytes)
        self._lock = threading.Condition()
        self._open_clients = 0
        self._stopping = False
        self._process = os.getpid()
        self._listener = _listen(host, port)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        bound = self._listener.getsockname()
        self.host: str = bound[0].removeprefix("::ffff:")
        self.port: int = bound[1]
        self._connections: set[_Connection] = set()
        self._strangers: set[_Connection] = set()  # those whose handshake is not over
        self._thread = threading.Thread(target=self._run, name="te-rendezvous", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """HOST:PORT for clients: where it listens, or this host's main address when it listens everywhere."""
        host = self.host if self.host not in ("", "::", "0.0.0.0") else _main_address()
        return environment.address_text(host, self.port)

    def close(self, linger_s: float = 0.0) -> None:
        """Ends the server; idempotent.

        Args:
            linger_s: seconds to wait for clients that are still connected, so that nobody loses an answer.
        """
        if self._process != os.getpid():  # a forked child has copies; the server belongs to the parent
            return
        with self._lock:
            if not self._stopping and linger_s > 0:
                self._lock.wait_for(lambda: self._open_clients == 0, linger_s)
            self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._patience()):
                    self._handle(key, events)
                now = time.monotonic()
                self._answer(self._board.late(now))
                for connection in [one for one in self._strangers if one.deadline <= now]:
                    self._drop(connection, "no greeting in time")
        except Exception:  # noqa: BLE001 - a thread has nobody to raise to
            _log.exception("the rendezvous server ends by an error of its own")
        finally:
            for connection in list(self._connections):
                self._drop(connection, "the server ends")
            for one in (self._listener, self._wake_receiver, self._wake_sender):
                one.close()
            self._selector.close()

    def _patience(self) -> float | None:
        deadlines = [one.deadline for one in self._strangers]
        waiting = self._board.next_deadline()
        if waiting is not None:
            deadlines.append(waiting)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        connection = key.data
        if connection is None:
            if key.fileobj is self._listener:
                self._accept()
            return
        if connection not in self._connections:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
                self._consume(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except (OSError, WireError) as cause:
            self._drop(connection, str(cause))

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # it went away again, or there are no descriptors left
            return
        if len(self._connections) >= _MOST_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        environment.keep_alive(accepted)
        connection = _Connection(accepted, time.monotonic() + _HANDSHAKE_S)
        self._connections.add(connection)
        self._strangers.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _drop(self, connection: _Connection, reason: str) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._strangers.discard(connection)
        self._board.forget(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.stage == "open" and connection.hello is not None:
            presence = Presence.LEFT if connection.left else Presence.LOST
            self._board.seat(connection.hello.job, connection.hello.rank, presence, time.monotonic())
            if not connection.left and not self._stopping:
                _log.debug("rendezvous: rank %d is gone: %s", connection.hello.rank, reason)
            with self._lock:
                self._open_clients -= 1
                self._lock.notify_all()

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        data = connection.socket.recv(_READ_BYTES)
        if not data:
            self._drop(connection, "it closed the connection")
            return
        connection.incoming += data
        self._consume(connection)

    def _consume(self, connection: _Connection) -> None:
        """Takes the messages that are complete, one after the other, as long as each is answered."""
        while connection in self._connections and not connection.outgoing:
            if self._board.waits(connection):
                if connection.incoming:
                    raise WireError("a second request before the first was answered")
                break
            if len(connection.incoming) < wire.LENGTH_BYTES:
                break
            most = wire.MOST_FRAME_BYTES if connection.stage == "open" else wire.MOST_HANDSHAKE_BYTES
            end = wire.LENGTH_BYTES + wire.body_length(connection.incoming, most)
            if len(connection.incoming) < end:
                break
            body = bytes(memoryview(connection.incoming)[wire.LENGTH_BYTES : end])
            del connection.incoming[:end]
            self._message(connection, body)
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Writes what is left to write before it reads on. A client that waits is read from, to see its death."""
        if connection in self._connections:
            events = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
            self._selector.modify(connection.socket, events, connection)

    def _send(self, connection: _Connection, body: bytes) -> None:
        sealed = connection.seal.sign(body) if connection.seal and connection.proved else body
        connection.outgoing += wire.frame(sealed)
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            del connection.outgoing[: connection.socket.send(connection.outgoing)]
        if not connection.outgoing and (connection.left or connection.stage == "refused"):
            self._drop(connection, "it said goodbye")
        self._watch(connection)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _message(self, connection: _Connection, body: bytes) -> None:
        if connection.stage == "hello":
            self._hello(connection, body)
        elif connection.stage == "proof":
            self._proof(connection, body)
        elif connection.stage == "open" and connection.hello is not None:
            ask = wire.decode_ask(connection.unseal.check(body) if connection.unseal else body)
            connection.left = ask.kind is Request.BYE
            self._answer(self._board.ask(connection, connection.hello.job, ask, time.monotonic()))

    def _answer(self, answers: list[tuple[_Connection, Answer]]) -> None:
        for connection, answer in answers:
            try:
                self._send(connection, wire.encode_answer(answer))
            except OSError as cause:
                self._drop(connection, str(cause))

    def _hello(self, connection: _Connection, body: bytes) -> None:
        hello = wire.decode_hello(body)
        connection.hello = hello
        refusal = self._objection(hello)
        if refusal is not None:
            self._refuse(connection, *refusal)
            return
        connection.challenge = auth.nonce()
        proof = auth.proof(self._token, "server", body, connection.challenge) if self._token else b""
        if self._token:
            connection.unseal = auth.Seal(self._token, "to server", body, connection.challenge)
            connection.seal = auth.Seal(self._token, "to client", body, connection.challenge)
            connection.challenge += auth.proof(self._token, "client", body, connection.challenge)
        connection.stage = "proof"
        self._send(connection, wire.encode_challenge(connection.challenge[: wire.NONCE_BYTES], proof))

    def _objection(self, hello: wire.Hello) -> tuple[Refusal, str] | None:
        if self._job is not None and hello.job != self._job:
            return Refusal.OTHER_JOB, "this store belongs to another job"
        if bool(self._token) is not hello.authenticated:
            has, lacks = ("store", "client") if self._token else ("client", "store")
            return Refusal.TOKEN, f"the {has} has a cluster token, the {lacks} has none"
        if self._world_size is not None and hello.world_size != self._world_size:
            return Refusal.WORLD_SIZE, f"this job has {self._world_size} ranks, not {hello.world_size}"
        return None

    def _proof(self, connection: _Connection, body: bytes) -> None:
        hello = connection.hello
        if hello is None:
            raise WireError("a proof before the greeting")
        if not auth.equal(body, connection.challenge[wire.NONCE_BYTES :] or wire.EMPTY_PROOF):
            self._refuse(connection, Refusal.TOKEN, "the client's cluster token is another one")
            return
        connection.proved = True
        if self._board.presence(hello.job, hello.rank) is Presence.CONNECTED:
            self._refuse(connection, Refusal.RANK_TAKEN, f"rank {hello.rank} is connected already")
            return
        self._board.seat(hello.job, hello.rank, Presence.CONNECTED, time.monotonic())
        with self._lock:
            self._open_clients += 1
        connection.stage = "open"
        self._strangers.discard(connection)
        self._send(connection, bytes((Reply.WELCOME,)))

    def _refuse(self, connection: _Connection, refusal: Refusal, text: str) -> None:
        connection.stage = "refused"
        self._send(connection, wire.encode_refused(refusal, text))


def _listen(host: str, port: int) -> socket.socket:
    try:
        if host:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
        elif socket.has_dualstack_ipv6():
            listener, address = socket.socket(socket.AF_INET6), ("::", port)
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        else:
            listener, address = socket.socket(socket.AF_INET), ("0.0.0.0", port)
    except OSError as cause:
        raise errors.ConfigError(f"{host or 'any address'}: {cause}", operation="Rendezvous") from cause
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as cause:
        listener.close()
        raise errors.ConfigError(
            f"cannot listen on {environment.address_text(host or '*', port)}: {cause.strerror or cause}",
            operation="Rendezvous",
            status=environment.errno_name(cause.errno),
            hint="choose another port, or 0 for any",
        ) from cause
    return listener


def _main_address() -> str:
    """The address from which this host would speak to the outside; nothing is sent."""
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"
