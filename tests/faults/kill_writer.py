"""`diloco pull --each` is killed while it writes: no folder that is marked DONE is half written.

python tests/faults/kill_writer.py --times 100 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file

from diloco_deploy.checkpoint import Writing
from diloco_deploy.checkpoint.work import DONE, write_each
from diloco_worker.global_model import GlobalModel

SIZE, KEPT = 300_000, 2


def models() -> Iterator[GlobalModel]:
    """One after the other; each is full of its own number."""
    version = 0
    while True:
        version += 1
        tensors = {"weight": torch.full((SIZE,), float(version)), "bias": torch.full((7,), float(version))}
        yield GlobalModel(tensors, frozenset(), {0: version}, 0, {n: n for n in tensors}, version=version)


def kill_writer(folder: Path, seed: int) -> tuple[int, int]:
    """Folders that are marked, and those that are not. Raises AssertionError where a marked one is not whole."""
    chance = random.Random(seed)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        write_each(models(), Writing(folder), KEPT)
        os._exit(1)
    time.sleep(chance.uniform(0.02, 0.25))  # the moment of the fault, not a wait for anything
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    marked = half = 0
    for one in folder.glob("version-*"):
        if not (one / DONE).exists():
            half += 1
            continue
        marked += 1
        version = float(one.name.removeprefix("version-"))
        (file,) = one.glob("*.safetensors")
        found = load_file(file)
        assert {name: len(values) for name, values in found.items()} == {"weight": SIZE, "bias": 7}, one
        assert all((values == version).all() for values in found.values()), one
    return marked, half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    marked = half = 0
    for seed in range(args.seed, args.seed + args.times):
        with tempfile.TemporaryDirectory() as folder:
            counts = kill_writer(Path(folder) / "out", seed)
        marked, half = marked + counts[0], half + counts[1]
    print(f"killed {args.times} times: {marked} marked folders, all whole; {half} without a mark")


if __name__ == "__main__":
    main()
