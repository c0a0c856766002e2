"""One rank of a job in which all ranks scatter to all in rounds. Run as a script; imports nothing of the test suite.

    python exchange.py STORE RANK WORLD_SIZE TRANSPORT ROUNDS SEED

In each round every rank writes another length (zero included) from another place of its source to another place of
every rank's memory, itself included; all of that follows from the seed, so that each rank knows every byte that it must
hold. Then a barrier keeps the ranks together.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

import transfer_engine as te

ROOM = 3000  # bytes that each rank has for each other
SOURCE = 8192
POISON = 0xA5
SOON_S = 120.0  # a deadline: many processes share few processors

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.int64]


def tables(seed: int, turn: int, world: int) -> tuple[Table, Table, Table]:
    """Lengths, source offsets and offsets in the room, each by sender and receiver."""
    rng = np.random.default_rng((seed, turn))
    shape = (world, world)
    lengths = rng.integers(0, ROOM, shape, endpoint=True)
    lengths[rng.random(shape) < 0.2] = 0
    if turn % 7 == 3:
        lengths[rng.integers(world)] = 0  # a rank that has nothing for anybody
    if turn % 7 == 5:
        lengths[:] = 0
    return lengths, rng.integers(0, SOURCE - lengths, endpoint=True), rng.integers(0, ROOM - lengths, endpoint=True)


def source_of(seed: int, rank: int) -> Bytes:
    return np.random.default_rng((seed, 1 << 40, rank)).integers(0, 256, SOURCE, np.uint8)


def verify(memory: Bytes, sources: list[Bytes], rank: int, turn: int, seed: int) -> None:
    world = len(sources)
    lengths, offsets, places = (table[:, rank] for table in tables(seed, turn, world))
    expected = np.full(world * ROOM, POISON, np.uint8)
    for sender, source in enumerate(sources):
        at = sender * ROOM + places[sender]
        expected[at : at + lengths[sender]] = source[offsets[sender] : offsets[sender] + lengths[sender]]
    if not np.array_equal(memory, expected):
        wrong = np.flatnonzero(memory != expected)
        sender, at = divmod(int(wrong[0]), ROOM)
        raise SystemExit(f"rank {rank}, round {turn}: {len(wrong)} wrong bytes, the first at {at} from rank {sender}")


def run(engine: te.Engine, group: te.Rendezvous, rounds: int, seed: int) -> None:
    rank, world = group.rank, group.world_size
    memory = np.full(world * ROOM, POISON, np.uint8)
    landing, arrived, come = engine.register(memory), engine.counter(), engine.counter()
    told = [
        group.all_gather(bytes(x)) for x in (engine.address, landing.descriptor, arrived.descriptor, come.descriptor)
    ]
    addresses = [te.Address.from_bytes(data) for data in told[0]]
    remotes = [te.RegionDescriptor.from_bytes(data) for data in told[1]]
    notify, gates = ([te.CounterDescriptor.from_bytes(data) for data in one] for one in told[2:])

    sources = [source_of(seed, other) for other in range(world)]
    outgoing = engine.register(sources[rank])
    peers = engine.peer_group(addresses, timeout_s=SOON_S)
    peers.wait(SOON_S)
    with peers.target(remotes, notify=notify) as target:
        for turn in range(1, rounds + 1):
            lengths, offsets, places = (np.ascontiguousarray(table[rank]) for table in tables(seed, turn, world))
            transfer = target.scatter(
                outgoing,
                src_offsets=offsets,
                lengths=lengths,
                dst_offsets=places + rank * ROOM,
                timeout_s=SOON_S,
                request_id=turn,
            )
            transfer.wait(SOON_S)
            value = arrived.wait(turn * world, timeout_s=SOON_S, peers=addresses)
            if value != turn * world:
                raise SystemExit(f"rank {rank}, round {turn}: {value} arrivals, expected {turn * world}")
            verify(memory, sources, rank, turn, seed)
            memory[:] = POISON
            peers.barrier(notify=gates, timeout_s=SOON_S).wait(SOON_S)
            value = come.wait(turn * world, timeout_s=SOON_S, peers=addresses)
            if value != turn * world:
                raise SystemExit(f"rank {rank}, round {turn}: {value} at the gate, expected {turn * world}")
    if (arrived.value, come.value) != (rounds * world, rounds * world):
        raise SystemExit(f"rank {rank}: counters at {arrived.value} and {come.value}, expected {rounds * world}")


def main() -> None:
    store, rank, world, transport, rounds, seed = sys.argv[1:]
    settings = te.Settings(
        transport=transport, nics="lo" if transport == "tcp" else None, core="none", polling="adaptive",
        timeout_s=SOON_S, connect_timeout_s=SOON_S, peer_timeout_s=60.0, close_timeout_s=60.0,
    )  # fmt: skip
    with te.Rendezvous(store, int(rank), int(world), timeout_s=SOON_S) as group, te.Engine(settings=settings) as engine:
        run(engine, group, int(rounds), int(seed))
        group.barrier()  # nobody closes an engine that a peer still writes to
        stats = engine.stats()["engine"]
        if stats["stray_immediates"] or stats["damaged_messages"]:
            raise SystemExit(f"rank {rank}: {stats}")
        group.barrier()


if __name__ == "__main__":
    main()
