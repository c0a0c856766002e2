"""Every process writes a block into the memory of every other one, and all blocks are verified.

    torchrun --nproc-per-node 4 docs/examples/torchrun_exchange.py --transport shm

Any launcher will do that sets torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); torch is not needed.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

import transfer_engine as te

BLOCK_BYTES = 1 << 20


def pattern(source: int, target: int) -> npt.NDArray[np.uint8]:
    """The block that `source` writes to `target`."""
    return np.random.default_rng((source, target)).integers(0, 256, BLOCK_BYTES, np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", help="efa, cx7, tcp or shm; default: the best that works here")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    with te.Rendezvous(timeout_s=60) as group, te.Engine(arguments.transport) as engine:
        rank, size = group.rank, group.world_size

        # One block per peer on either side: block p of `outgoing` goes to rank p, block p of `incoming` comes from it.
        outgoing = engine.register(np.concatenate([pattern(rank, peer) for peer in range(size)]))
        memory = np.zeros(size * BLOCK_BYTES, np.uint8)
        incoming = engine.register(memory)
        arrived = engine.counter()

        # Everybody tells everybody where to write and whom to notify. Nothing else is needed to reach a peer.
        regions = group.all_gather(bytes(incoming.descriptor))
        counters = group.all_gather(bytes(arrived.descriptor))
        targets = [te.RegionDescriptor.from_bytes(data) for data in regions]
        notify = [te.CounterDescriptor.from_bytes(data) for data in counters]
        mine = slice(rank * BLOCK_BYTES, (rank + 1) * BLOCK_BYTES)

        for number in range(1, arguments.rounds + 1):
            transfers = [
                engine.write(
                    outgoing[peer * BLOCK_BYTES : (peer + 1) * BLOCK_BYTES], targets[peer][mine], notify=notify[peer]
                )
                for peer in range(size)
                if peer != rank
            ]
            for transfer in transfers:
                transfer.wait(timeout_s=30)
            arrived.wait(at_least=number * (size - 1), timeout_s=30)

            for peer in range(size):
                block = memory[peer * BLOCK_BYTES : (peer + 1) * BLOCK_BYTES]
                if peer != rank and not np.array_equal(block, pattern(peer, rank)):
                    raise SystemExit(f"rank {rank}: wrong bytes from rank {peer} in round {number}")
            memory[:] = 0
            group.barrier()  # everybody has verified: the next round may overwrite

        verified = arguments.rounds * (size - 1) * BLOCK_BYTES
        print(f"rank {rank} of {size} on {engine.transport}: {verified} bytes verified", flush=True)
        group.barrier()  # nobody closes an engine that a peer still writes to


if __name__ == "__main__":
    main()
