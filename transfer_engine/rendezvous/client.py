"""The store's client. It has the methods of torch.distributed's stores: set, get, wait, add, check, delete_key."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from .. import errors
from . import auth, environment, wire
from .environment import Meeting
from .wire import Answer, Ask, Presence, Refusal, Reply, Request, WireError

_GRACE_S = 5.0  # the server tells what is late; this long after, it is the server that is
_GREETING_S = 3.0  # a port that does not answer by then belongs to somebody else, or is overloaded: tried again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_READ_BYTES = 1 << 20
_HINT = "look at rank 0, or whoever serves the store: its log, and whether it closed the rendezvous before the others"


class TcpStore:
    """A connection to a `StoreServer`. Threads may share it; their requests take turns.

    Args:
        meeting: where to look for the server.
        job: the job's name.
        rank: of this process; a server has each rank of a job once.
        world_size: how many ranks the job has.
        token: the cluster token; None: the environment's, b"": none.
        timeout_s: seconds for connecting, and for requests that name no time of their own.

    Raises:
        PeerUnreachable: no such server within the time.
        ConfigError: the server refuses: other token, other world size, or a rank that is there already.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        job: str = "",
        rank: int = 0,
        world_size: int = 1,
        token: bytes | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._token = auth.cluster_token() if token is None else token
        self._timeout_s = timeout_s
        self._rank = rank
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._broken: str | None = None
        self._seal: auth.Seal | None = None
        self._unseal: auth.Seal | None = None
        self._buffer = bytearray()
        self._socket, self.address = self._connect(meeting, job, world_size)

    # --- the store --------------------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        """Stores a value, in place of an earlier one.

        Raises:
            ResourceExhausted: the store is full.
            ArgumentError: the value or the key is too long.
        """
        data = value.encode() if isinstance(value, str) else bytes(value)
        if len(data) > wire.MOST_VALUE_BYTES:
            raise errors.ArgumentError(
                f"a value of {len(data)} bytes; at most {wire.MOST_VALUE_BYTES}", operation="set"
            )
        self._request(Ask(Request.SET, (key,), data), self._timeout_s)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """A key's value, as soon as there is one.

        Raises:
            TransferTimeout: there was none in time.
        """
        return self.multi_get([key], timeout_s)[0]

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of several keys, as soon as all are there.

        Raises:
            TransferTimeout: they were not in time.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        values: list[bytes] = []
        while len(values) < len(keys):
            part = tuple(keys[len(values) : len(values) + wire.MOST_KEYS])
            left = max(0.0, deadline - time.monotonic())
            values += self._request(Ask(Request.GET, part, timeout_s=left), left).values
        return values

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Returns as soon as all keys are there.

        Raises:
            TransferTimeout: they were not in time.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deadline = time.monotonic() + (self._timeout_s if seconds is None else seconds)
        for begin in range(0, len(keys), wire.MOST_KEYS):
            left = max(0.0, deadline - time.monotonic())
            self._request(Ask(Request.WAIT, tuple(keys[begin : begin + wire.MOST_KEYS]), timeout_s=left), left)

    def add(self, key: str, amount: int) -> int:
        """Adds to a key's number (zero when there is none) and returns the sum.

        Raises:
            ArgumentError: its value is no number, or the sum has more than 64 bits.
        """
        return self._request(Ask(Request.ADD, (key,), number=amount), self._timeout_s).number

    def check(self, keys: Sequence[str]) -> bool:
        """All keys are there."""
        return all(self.present(keys))

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there."""
        flags: list[bool] = []
        for begin in range(0, len(keys), wire.MOST_KEYS):
            part = tuple(keys[begin : begin + wire.MOST_KEYS])
            flags += self._request(Ask(Request.CHECK, part), self._timeout_s).flags
        return flags

    def delete_key(self, key: str) -> bool:
        """Removes a key; whether it was there."""
        return self._request(Ask(Request.DELETE, (key,)), self._timeout_s).number != 0

    def ranks(self) -> dict[int, tuple[Presence, float]]:
        """What the server knows of the job's ranks: each one's state, and the seconds since it changed."""
        answer = self._request(Ask(Request.WHO), self._timeout_s)
        return {rank: (presence, age) for rank, presence, age in answer.ranks}

    def close(self) -> None:
        """Takes leave; idempotent, never raises."""
        if self._broken is None and self._process == os.getpid():
            with contextlib.suppress(errors.TransferEngineError):
                self._request(Ask(Request.BYE), 1.0)
        self._broken = self._broken or "this store was closed"
        self._socket.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _request(self, ask: Ask, timeout_s: float) -> Answer:
        if self._process != os.getpid():
            raise errors.ForkedEngine("the store's connection belongs to the parent of this process", operation="store")
        for key in ask.keys:
            if not 0 < len(key.encode()) <= wire.MOST_KEY_BYTES:
                raise errors.ArgumentError(f"a key of {len(key.encode())} bytes; 1 to {wire.MOST_KEY_BYTES}")
        operation = ask.kind.name.lower()
        with self._lock:
            if self._broken is not None:
                raise errors.PeerUnreachable(self._broken, operation=operation, peer=self.address, hint=_HINT)
            try:
                self._socket.settimeout(timeout_s + _GRACE_S)
                self._send(wire.encode_ask(ask))
                deadline = time.monotonic() + timeout_s + _GRACE_S
                answer = wire.decode_answer(self._receive(deadline, wire.MOST_FRAME_BYTES))
            except BaseException as cause:  # half a message may be under way: nothing after it would be understood
                self._broken = f"the store does not answer any more ({_reason(cause)}): rank 0's process may have ended"
                self._socket.close()
                if not isinstance(cause, (OSError, WireError)):
                    raise
                raise errors.PeerUnreachable(
                    self._broken, operation=operation, peer=self.address, status=_status(cause), hint=_HINT
                ) from cause
        if answer.kind is Reply.LATE:
            text = f"{len(ask.keys)} keys, not all of which were there"
            raise errors.TransferTimeout(
                text, operation=operation, elapsed_s=timeout_s, hint="whoever sets these keys is late or gone"
            )
        if answer.kind is Reply.FAILED:
            error = errors.ResourceExhausted if "the store is full" in answer.text else errors.ArgumentError
            raise error(answer.text, operation=operation)
        return answer

    def _send(self, body: bytes) -> None:
        self._socket.sendall(wire.frame(self._seal.sign(body) if self._seal else body))

    def _receive(self, deadline: float, most: int) -> bytes:
        self._fill(wire.LENGTH_BYTES, deadline)
        end = wire.LENGTH_BYTES + wire.body_length(self._buffer, most)
        self._fill(end, deadline)
        body = bytes(memoryview(self._buffer)[wire.LENGTH_BYTES : end])
        del self._buffer[:end]
        return self._unseal.check(body) if self._unseal else body

    def _fill(self, length: int, deadline: float) -> None:
        while len(self._buffer) < length:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer in time")
            self._socket.settimeout(left)
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._buffer += data

    # --- connecting -------------------------------------------------------------------------------------------------

    def _connect(self, meeting: Meeting, job: str, world_size: int) -> tuple[socket.socket, str]:
        """Tries every place until the job's server lets this rank in."""
        begin = time.monotonic()
        deadline = begin + self._timeout_s
        reasons: dict[str, str] = {}
        pause = _FIRST_PAUSE_S
        while True:
            for port in meeting.ports:
                address = environment.address_text(meeting.host, port)
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    self._socket = socket.create_connection((meeting.host, port), timeout=min(left, _GREETING_S))
                except OSError as cause:
                    reasons[address] = _reason(cause)
                    continue
                try:
                    reason = self._greet(job, world_size, min(deadline, time.monotonic() + _GREETING_S), address)
                except (OSError, WireError) as cause:
                    reason = f"no rendezvous store answers there ({_reason(cause)})"
                except BaseException:
                    self._socket.close()
                    raise
                if reason is None:
                    return self._socket, address
                reasons[address] = reason
                self._socket.close()
            if time.monotonic() >= deadline:
                break
            _pause.wait(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(_LONGEST_PAUSE_S, 1.5 * pause)
        tried = "; ".join(f"{address}: {reason}" for address, reason in reasons.items()) or "no time to try any port"
        raise errors.PeerUnreachable(
            f"no store of this job within {self._timeout_s:g} s ({tried})",
            operation="Rendezvous",
            peer=environment.address_text(meeting.host, meeting.ports[0]),
            elapsed_s=time.monotonic() - begin,
            hint="rank 0 serves the store: check that it runs, its address, and that no firewall is in between",
        )

    def _greet(self, job: str, world_size: int, deadline: float, address: str) -> str | None:
        """The handshake. None: we are in; else why this is not the server we look for.

        Raises:
            ConfigError: it is, and it refuses.
        """
        self._seal = self._unseal = None
        self._buffer.clear()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        environment.keep_alive(self._socket)
        hello = wire.Hello(job, self._rank, world_size, auth.nonce(), bool(self._token)).encode()
        self._send(hello)
        challenge = wire.decode_answer(self._receive(deadline, wire.MOST_HANDSHAKE_BYTES))
        if challenge.kind is Reply.CHALLENGE:
            proof = wire.EMPTY_PROOF
            if self._token:
                expected = auth.proof(self._token, "server", hello, challenge.nonce)
                if not auth.equal(challenge.proof, expected):
                    raise _refused("the store's cluster token is another one", address)
                proof = auth.proof(self._token, "client", hello, challenge.nonce)
            self._send(proof)
            if self._token:
                self._seal = auth.Seal(self._token, "to server", hello, challenge.nonce)
                self._unseal = auth.Seal(self._token, "to client", hello, challenge.nonce)
            challenge = wire.decode_answer(self._receive(deadline, wire.MOST_HANDSHAKE_BYTES))
        if challenge.kind is Reply.WELCOME and (not self._token or self._unseal):
            return None
        if challenge.kind is Reply.REFUSED and challenge.refusal is not Refusal.OTHER_JOB:
            raise _refused(challenge.text, address)
        return challenge.text or "no rendezvous store answers there"


_pause = threading.Event()  # never set: an interruptible pause


def _refused(text: str, address: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"the rendezvous store refuses: {text}",
        operation="Rendezvous",
        peer=address,
        hint="every rank needs its own RANK, the same WORLD_SIZE and the same TE_CLUSTER_TOKEN",
    )


def _reason(cause: BaseException) -> str:
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__


def _status(cause: BaseException) -> str | None:
    number = cause.errno if isinstance(cause, OSError) else None
    return environment.errno_name(number)
