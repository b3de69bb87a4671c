"""A run of one single process, one island of DDP and one of FSDP2, beside a run of three single processes.

    python benchmarks/island_numerics.py --seeds 1 2 3 4 5

    mixed       one process, four ranks of DDP, two ranks of FSDP2: three learners
    single      three processes: the same learners, with the same global batches

Every learner draws the same batches of the same text, whoever it is: a rank takes its part of the learner's batch. So
both runs of a seed differ only in who computes what, and when messages come. They begin once all three have joined, and
end with the budget of the run. A learner that is ahead of the run waits. The text is English prose that comes with
Python (`pydoc_data.topics`), in characters; the loss is that of the last tenth, in nats per character, of the global
model. Ranks are forked from a process that has imported torch, so that imports do not take most of the time. Prints one
line of JSON for each seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from light_learners import running_shard
from topics import characters

CONTEXT, WIDTH, BATCH = 16, 96, 48
SYNC_EVERY, FRAGMENTS = 20, 4
AHEAD = 2 * SYNC_EVERY
"""Steps that a learner may be ahead of the run."""
WAIT_S = 0.1
WAYS = {"mixed": {"a": ("single", 1), "b": ("ddp", 4), "c": ("fsdp", 2)}, "single": dict.fromkeys("abc", ("single", 1))}
"""Kind of run -> learner -> what it is, and its processes."""
LEARNERS = 3
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["diloco_worker.joining", "torch._dynamo", "torch.distributed.fsdp"])


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


def process(
    kind: str, shards: str, name: str, seed: int, steps: int, out: str, rank: int, size: int, port: int
) -> None:
    """One process of a learner. `port`: where the ranks of an island meet."""
    import diloco_worker

    torch.set_num_threads(1)
    data = torch.from_numpy(characters())
    held_out = len(data) * 9 // 10
    torch.manual_seed(seed)
    model = next_character(int(data.max()) + 1)
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        is_ddp = kind == "ddp"
        model = DistributedDataParallel(model) if is_ddp else fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = torch.Generator().manual_seed(1000 * seed + ord(name))  # alike at all ranks
    island = dist.group.WORLD if size > 1 else None
    with diloco_worker.join(shards, model, learner_id=name, island=island, wait_s=900.0, log=None) as learner:
        while learner.learners_alive < LEARNERS and not learner.done:  # else who comes first trains alone
            learner.poll(WAIT_S)
        for step in itertools.count():
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
        learner.finish()
    with torch.no_grad():
        found = loss_at(model, data, torch.arange(held_out, len(data), 7))  # at all ranks: FSDP2 gathers
    if rank == 0:
        Path(out, f"{name}.json").write_text(json.dumps({"loss": float(found), "steps": learner.inner_step}))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def trained(learners: dict[str, tuple[str, int]], seed: int, steps: int) -> dict[str, float]:
    """The loss after a run of these learners, and the steps of each."""
    settings = [
        f"sync.quorum={LEARNERS}", f"sync.sync_every={SYNC_EVERY}", f"sync.fragments={FRAGMENTS}",
        f"run.tokens={LEARNERS * steps * BATCH}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, running_shard(*settings) as shard:
        running, stores = [], []
        for name, (kind, size) in learners.items():
            stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            for rank in range(size):
                given = (kind, shard.address, name, seed, steps, folder, rank, size, stores[-1].port)
                running.append(forks.Process(target=process, args=given, daemon=True))
                running[-1].start()
        for one in running:
            one.join()
        if any(one.exitcode for one in running):
            sys.exit("a learner failed")
        found = {name: json.loads(Path(folder, f"{name}.json").read_text()) for name in learners}
    losses = [one["loss"] for one in found.values()]
    if max(losses) - min(losses) > 1e-5:
        sys.exit(f"learners end with different models: {found}")
    return {"loss": fmean(losses)} | {f"steps of {name}": one["steps"] for name, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=200, help="of each learner, about: the budget of the run")
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
