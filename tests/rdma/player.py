"""Both ends of a few RDMA operations over pyverbs, in one process.

A program of its own for the system's Python, which has pyverbs. Reads one request a line from standard input,
[name, arguments] in JSON, and answers each with {"result": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

DEADLINE_S = 60
GUARD = 4096  # bytes before and after what is written to
POISON = b"\xa5"
GRH = 40  # bytes of a global routing header, which precede each datagram
QKEY = 0x11111111
MTU_4096 = 5
ACK_TIMEOUT = 16  # 4.096 us * 2 ** 16 = 0.27 s
RETRIES = 7

connections: list[tuple[End, End, int, int]] = []


class End:
    """A queue pair on a device, with a completion queue and a poisoned region of its own."""

    def __init__(self, device: str, gid: int, kind: int, length: int, depth: int = 64) -> None:
        self.gid = gid
        self.length = length
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 2 * depth)
        self.mr = MR(self.pd, length + 2 * GUARD, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
        self.fill(POISON * (length + 2 * GUARD), at=-GUARD)
        capacity = QPCap(max_send_wr=depth, max_recv_wr=depth)
        self.qp = QP(self.pd, QPInitAttr(qp_type=kind, scq=self.cq, rcq=self.cq, cap=capacity, sq_sig_all=1))

    @property
    def address(self) -> int:
        return int(self.mr.buf) + GUARD

    def fill(self, data: bytes, at: int = 0) -> None:
        self.mr.write(data, len(data), GUARD + at)

    def content(self) -> bytes:
        return bytes(self.mr.read(self.length, GUARD))

    def guards_hold(self) -> bool:
        length = self.length
        return all(self.mr.read(GUARD, at) == POISON * GUARD for at in (0, GUARD + length))

    def path_to(self, other: End) -> AHAttr:
        route = GlobalRoute(dgid=other.context.query_gid(1, other.gid), sgid_index=self.gid)
        return AHAttr(gr=route, is_global=1, port_num=1)

    def connect(self, other: End, retries: int) -> None:
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        attributes.dest_qp_num = other.qp.qp_num
        attributes.path_mtu = MTU_4096
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 12
        attributes.timeout = ACK_TIMEOUT
        attributes.retry_cnt = retries
        attributes.rnr_retry = RETRIES
        attributes.ah_attr = self.path_to(other)
        self.qp.to_rts(attributes)

    def pieces(self, at: int, length: int) -> list[SGE]:
        return [SGE(self.address + at, length, self.mr.lkey)]

    def completions(self, count: int, until: float) -> list[Any]:
        """This many, or fewer if the time is over or one is an error."""
        found: list[Any] = []
        while len(found) < count and time.monotonic() < until:
            found += self.cq.poll(count - len(found))[1]
            if found and found[-1].status != e.IBV_WC_SUCCESS:
                break
        return found


def summary(completions: list[Any]) -> dict[str, Any]:
    return {
        "statuses": [completion.status for completion in completions],
        "opcodes": [completion.opcode for completion in completions],
        "immediates": [completion.imm_data for completion in completions],
        "lengths": [completion.byte_len for completion in completions],
        "grh": all(completion.wc_flags & e.IBV_WC_GRH for completion in completions),
    }


def outcome(one: End, other: End, count: int, begin: float) -> dict[str, Any]:
    """What became of what was posted: completions of both ends, and whether anything lies where it must not."""
    sent = one.completions(count, begin + DEADLINE_S)
    ok = all(completion.status == e.IBV_WC_SUCCESS for completion in sent)
    received = other.completions(count, begin + DEADLINE_S) if ok else []
    return {
        "elapsed_s": time.monotonic() - begin,
        "sent": summary(sent),
        "received": summary(received),
        "guards": other.guards_hold(),
    }


def devices() -> list[str]:
    return [device.name.decode() for device in get_device_list()]


def connect(source: str, target: str, gid: int, length: int, count: int = 1, retries: int = RETRIES) -> int:
    """A connection for `count` writes of this length; the answer is its number."""
    one, other = (End(device, gid, e.IBV_QPT_RC, length * count) for device in (source, target))
    one.connect(other, retries)
    other.connect(one, retries)
    connections.append((one, other, length, count))
    return len(connections) - 1


def write(connection: int) -> dict[str, Any]:
    """All its writes, each with its number as the immediate, side by side."""
    one, other, length, count = connections[connection]
    data = random.Random(connection).randbytes(length * count)
    one.fill(data)
    for _ in range(count):
        other.qp.post_recv(RecvWR(num_sge=1, sg=other.pieces(0, 0)))  # pyverbs wants a piece
    begin = time.monotonic()
    for index in range(count):
        piece = one.pieces(index * length, length)
        request = SendWR(opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM, num_sge=1, sg=piece, imm_data=index)
        request.set_wr_rdma(other.mr.rkey, other.address + index * length)
        one.qp.post_send(request)
    return outcome(one, other, count, begin) | {"equal": other.content() == data}


def datagram(source: str, target: str, gid: int, length: int) -> dict[str, Any]:
    one, other = (End(device, gid, e.IBV_QPT_UD, GRH + length) for device in (source, target))
    for end in (one, other):
        attributes = QPAttr(port_num=1)
        attributes.qkey = QKEY
        end.qp.to_rts(attributes)
    data = random.Random(length).randbytes(length)
    one.fill(data)
    other.qp.post_recv(RecvWR(num_sge=1, sg=other.pieces(0, GRH + length)))
    request = SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=one.pieces(0, length))
    request.set_wr_ud(AH(one.pd, attr=one.path_to(other)), other.qp.qp_num, QKEY)
    one.qp.post_send(request)
    return outcome(one, other, 1, time.monotonic()) | {"equal": other.content()[GRH:] == data}


def throw(source: str, target: str, queue_pair: int, queue_key: int, datagrams: list[str]) -> list[int]:
    """Sends datagrams (hexadecimal) to a queue pair of somebody else; the answer is the statuses of the sends."""
    end = End(source, 1, e.IBV_QPT_UD, max(len(text) // 2 for text in datagrams))
    attributes = QPAttr(port_num=1)
    attributes.qkey = queue_key
    end.qp.to_rts(attributes)
    route = GlobalRoute(dgid=GID(target), sgid_index=end.gid)
    handle = AH(end.pd, attr=AHAttr(gr=route, is_global=1, port_num=1))
    statuses = []
    for text in datagrams:
        data = bytes.fromhex(text)
        end.fill(data)
        request = SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=end.pieces(0, len(data)))
        request.set_wr_ud(handle, queue_pair, queue_key)
        end.qp.post_send(request)
        statuses += [completion.status for completion in end.completions(1, time.monotonic() + DEADLINE_S)]
    return statuses


def main() -> None:
    actions = {action.__name__: action for action in (devices, connect, write, datagram, throw)}
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": actions[name](**arguments)}
        except Exception:  # noqa: BLE001
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
