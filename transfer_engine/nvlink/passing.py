"""Passes a file descriptor to the other ranks of this host, over a Unix socket.

The socket has a random name in Linux's abstract namespace, so nothing is left behind when a process is killed. Names
are no secret: whoever connects must belong to the same user (SO_PEERCRED, which the kernel vouches for) and show the
token that went over the rendezvous, and gets a token back that proves whose socket it is.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass

_TOKEN_BYTES = 32
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MOST_DESCRIPTORS = 4
_PATIENCE_S = 5.0  # for a client that connected and says nothing
_REFUSED = b"refused"


class PassingError(Exception):
    """The descriptor did not come. `gone`: because the other process has ended."""

    def __init__(self, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a client must know: the socket's name, the token to show, the token to be shown."""

    name: bytes
    question: bytes
    answer: bytes

    @classmethod
    def fresh(cls) -> Ticket:
        """Random."""
        return cls(b"\0te-nvlink-" + secrets.token_hex(16).encode(), *(secrets.token_bytes(_TOKEN_BYTES) for _ in "qa"))


class Counter:
    """Hands a descriptor, which it takes over, to whoever has the ticket, in a thread of its own until it is closed."""

    def __init__(self, descriptor: int) -> None:
        self.ticket = Ticket.fresh()
        self._descriptor = descriptor
        self._wake, self._woken = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(self.ticket.name)
            self._listener.listen(128)
            self._listener.setblocking(False)
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._serve, name="te nvlink", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._wake.send(b"x")
            self._thread.join()
        self._release()

    def _release(self) -> None:
        for end in (self._listener, self._wake, self._woken):
            end.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _serve(self) -> None:
        clients: dict[socket.socket, float] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                while True:
                    ready = {key.fileobj for key, _ in selector.select(1.0 if clients else None)}
                    if self._woken in ready:
                        return
                    if self._listener in ready:
                        with contextlib.suppress(OSError):
                            client, _ = self._listener.accept()
                            client.setblocking(False)
                            clients[client] = time.monotonic() + _PATIENCE_S
                            selector.register(client, selectors.EVENT_READ)
                    for client, until in list(clients.items()):
                        if client in ready or time.monotonic() > until:
                            selector.unregister(client)
                            del clients[client]
                            with contextlib.suppress(OSError), client:
                                self._answer(client)
            finally:
                for client in clients:
                    client.close()

    def _answer(self, client: socket.socket) -> None:
        question = client.recv(4 * _TOKEN_BYTES)  # in any case: closing with something unread would look like a crash
        if _user_of(client) != os.geteuid():
            client.send(_REFUSED + b": the user is another one")
        elif not hmac.compare_digest(question, self.ticket.question):
            client.send(_REFUSED + b": the token is another one")
        else:
            socket.send_fds(client, [self.ticket.answer], [self._descriptor])


def fetch(ticket: Ticket, deadline: float) -> int:
    """The descriptor of a peer; the caller's to close.

    Raises:
        PassingError: it did not come by the deadline (of time.monotonic), or not from whom it should.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            connection.connect(ticket.name)
            if _user_of(connection) != os.geteuid():
                raise PassingError("its socket belongs to another user")
            connection.send(ticket.question)
            data, descriptors = _received(connection)
        except TimeoutError:
            raise PassingError("it did not answer in time") from None
        except OSError as cause:
            gone = isinstance(cause, ConnectionError)
            raise PassingError(f"its socket: {cause.strerror or cause}", gone=gone) from None
    if len(descriptors) == 1 and hmac.compare_digest(data, ticket.answer):
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    if not data:
        raise PassingError("it hung up", gone=True)
    if data.startswith(_REFUSED):
        raise PassingError(f"it {data.decode(errors='replace')}")
    raise PassingError("its socket is served by somebody else")


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A message and its descriptors, which children do not inherit: socket.recv_fds ignores the flag for that."""
    descriptors = array.array("i")
    space = socket.CMSG_LEN(_MOST_DESCRIPTORS * descriptors.itemsize)
    data, extra, _, _ = connection.recvmsg(256, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _user_of(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])
