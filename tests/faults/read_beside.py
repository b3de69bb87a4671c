"""Rounds of a shard with and without a reader of every version beside it, by turns.

    python tests/faults/read_beside.py --pairs 12 --seconds 5

Two learners step all the while. The reader is a process that takes `diloco_worker.versions`; what that gives is
compared with `pull_global_model`, bit for bit, once the learners stand still.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from steady import SteadyCluster

import diloco_worker
import forks
from processes import until, versions


def read(shards: str, control: Connection, log: Path) -> None:
    """Until it is killed; answers how many versions it got, and a digest of the last one."""
    forks.log_to(log)
    torch.set_num_threads(1)
    for count, found in enumerate(diloco_worker.versions(shards.split(",")), 1):
        if control.poll(0):
            control.recv()
            control.send((count, found.versions, {name: t.numpy().tobytes() for name, t in found.tensors.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    shares, read_count, made = list[float](), 0, 0
    with (
        tempfile.TemporaryDirectory() as name,
        SteadyCluster(Path(name), {"sync.sync_every": 24}, width=200) as cluster,
    ):
        cluster.add("ann", "ben")
        (shard,) = cluster.shards

        def rate() -> float:
            before, began = sum(versions(shard.status()).values()), time.monotonic()
            time.sleep(args.seconds)  # what is measured
            return (sum(versions(shard.status()).values()) - before) / (time.monotonic() - began)

        for pair in range(args.pairs):
            found = {}
            for with_reader in (pair % 2 == 0, pair % 2 == 1):
                if not with_reader:
                    found[False] = rate()
                    continue
                reader = forks.Answering(
                    f"reader-{pair}", Path(name) / f"reader-{pair}.log", read, shard.endpoints.grpc
                )
                first, _, _ = reader.ask()
                found[True] = rate()
                count, _, _ = reader.ask()
                read_count, made = read_count + count - first, made + round(found[True] * args.seconds / 4)
                reader.kill()
            shares.append(found[True] / found[False])
        reader = forks.Answering("reader", Path(name) / "reader.log", read, shard.endpoints.grpc)
        reader.ask()
        cluster.ask("pause")
        now = until(lambda: (a := versions(shard.status())) == versions(shard.status()) and a, "the last version")
        reader.kill()
        told = {i: t.numpy().tobytes() for i, t in next(diloco_worker.versions([shard.endpoints.grpc])).tensors.items()}
        pulled = diloco_worker.pull_global_model([shard.endpoints.grpc])
        assert pulled.versions == now
        assert told == {i: t.numpy().tobytes() for i, t in pulled.tensors.items()}
    mean, error = statistics.mean(shares), statistics.stdev(shares) / len(shares) ** 0.5
    print(f"{args.pairs} pairs: versions per second with a reader {mean:.3f} +- {error:.3f} of those without")
    print(f"it took {read_count} global models of about {made} versions; equal to pull's, bit for bit")


if __name__ == "__main__":
    main()
