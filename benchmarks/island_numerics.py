"""A run of one single process, one island of DDP and one of FSDP2, beside a run of three single processes.

    python benchmarks/island_numerics.py --seeds 1 2 3 4 5

    mixed       one process, four ranks of DDP, two ranks of FSDP2: three learners
    single      three processes: the same learners, with the same global batches

Every learner takes as many steps on batches of the same text, whoever it is: a rank takes its part of the learner's
batch. So both runs of a seed differ only in who computes what, and when messages come. A learner that is ahead of the
run waits. The text is English prose that comes with Python (`pydoc_data.topics`), in characters; the loss is that of
the last tenth, in nats per character, at the end of the run. Prints one line of JSON for each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor, nn

from light_learners import running_shard

CONTEXT, WIDTH, BATCH = 16, 96, 48
SYNC_EVERY, FRAGMENTS = 20, 4
AHEAD = 2 * SYNC_EVERY
"""Steps that a learner may be ahead of the run."""
WAIT_S = 0.1
WAYS = {"mixed": {"a": ("single", 1), "b": ("ddp", 4), "c": ("fsdp", 2)}, "single": dict.fromkeys("abc", ("single", 1))}
"""Kind of run -> learner -> what it is, and its processes."""


def text() -> Tensor:
    """Of the standard library, as numbers from 0."""
    words = "\n".join(words for _, words in sorted(pydoc_data.topics.topics.items()))
    code = {c: i for i, c in enumerate(sorted(set(words)))}
    return torch.tensor([code[c] for c in words])


def next_character(num_characters: int) -> nn.Module:
    """From the last CONTEXT characters."""
    return nn.Sequential(
        nn.Embedding(num_characters, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, WIDTH), nn.GELU(),
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, num_characters),
    )  # fmt: skip


def loss_at(model: nn.Module, data: Tensor, ends: Tensor) -> Tensor:
    """Of the characters at these places, mean."""
    windows = data[ends.unsqueeze(1) + torch.arange(-CONTEXT, 0)]
    return nn.functional.cross_entropy(model(windows), data[ends])


def process(kind: str, shards: str, name: str, seed: int, steps: int, out: str) -> None:
    """One process of a learner."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import diloco_worker

    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    data = text()
    held_out = len(data) * 9 // 10
    torch.manual_seed(seed)
    model = next_character(int(data.max()) + 1)
    if size > 1:
        dist.init_process_group("gloo")
        is_ddp = kind == "ddp"
        model = DistributedDataParallel(model) if is_ddp else fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = torch.Generator().manual_seed(1000 * seed + ord(name))  # alike at all ranks
    island = dist.group.WORLD if size > 1 else None
    with diloco_worker.join(shards, model, learner_id=name, island=island, wait_s=900.0, log=None) as learner:
        for step in range(steps):
            ends = torch.randint(CONTEXT, held_out, (BATCH,), generator=batches)[rank::size]
            loss = loss_at(model, data, ends)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(ends), loss=loss)
            while step > learner.fraction * steps + AHEAD and not learner.done:
                learner.poll(WAIT_S)
            if learner.done:
                break
        while not learner.done:  # what is under way reaches the budget, or nearly
            learner.poll(WAIT_S)
            if learner.fraction > 1 - 2 * SYNC_EVERY / steps:
                break
        learner.finish()
    with torch.no_grad():
        found = loss_at(model, data, torch.arange(held_out, len(data), 7))  # at all ranks: FSDP2 gathers
    if rank == 0:
        Path(out, f"{name}.json").write_text(json.dumps({"loss": float(found), "steps": learner.inner_step}))
    if size > 1:
        dist.destroy_process_group()


def trained(learners: dict[str, tuple[str, int]], seed: int, steps: int) -> dict[str, float]:
    """The loss after a run of these learners, and the steps of each."""
    settings = [
        "sync.quorum=3", f"sync.sync_every={SYNC_EVERY}", f"sync.fragments={FRAGMENTS}",
        f"run.tokens={3 * steps * BATCH}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, running_shard(*settings) as shard:
        running = []
        for name, (kind, size) in learners.items():
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
            arguments = ["--process", kind, shard.address, name, str(seed), str(steps), folder]
            running.append(subprocess.Popen([sys.executable, *launcher, __file__, *arguments]))
        ended = [one.wait() for one in running]
        if any(ended):
            sys.exit("a learner failed")
        found = {name: json.loads(Path(folder, f"{name}.json").read_text()) for name in learners}
    losses = {one["loss"] for one in found.values()}
    if max(losses) - min(losses) > 1e-5:
        print(f"learners end with different models: {found}", file=sys.stderr)
    return {"loss": fmean(losses)} | {f"steps of {name}": one["steps"] for name, one in found.items()}


def main() -> None:
    if "--process" in sys.argv:
        kind, shards, name, seed, steps, out = sys.argv[2:8]
        process(kind, shards, name, int(seed), int(steps), out)
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=300, help="of each learner")
    args = parser.parse_args()
    differences = []
    for seed in args.seeds:
        found = {way: trained(learners, seed, args.steps) for way, learners in WAYS.items()}
        differences.append(found["mixed"]["loss"] - found["single"]["loss"])
        print(json.dumps({"seed": seed} | found), flush=True)
    if len(differences) > 1:
        error = stdev(differences) / len(differences) ** 0.5
        print(f"mixed - single: {fmean(differences):+.4f}, standard error {error:.4f}")


if __name__ == "__main__":
    main()
