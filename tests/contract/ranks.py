"""One rank of two, started by torchrun: tries to join in every way that is refused, or as a learner of its own."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import diloco_worker
from diloco_common.errors import UnsupportedModel


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def fsdp1(**options: bool) -> nn.Module:
    return FullyShardedDataParallel(plain(), device_id=torch.device("cpu"), **options)


def refused(shards: str) -> None:
    """Says how each model is refused, and ends as a script does that refuses to be refused."""
    models = {
        "ddp": DistributedDataParallel(plain()),
        "fsdp1": fsdp1(),
        "fsdp1, inside": fsdp1().module,
        "fsdp2": fully_shard(plain(), mesh=init_device_mesh("cpu", (2,))),
        "inside of ddp": DistributedDataParallel(plain()).module,
    }
    for kind, model in models.items():
        try:
            diloco_worker.join(shards, model, wait_s=1.0)
        except UnsupportedModel as error:
            print(json.dumps({"rank": dist.get_rank(), "kind": kind, "why": str(error)}) + "\n", end="", flush=True)
    dist.barrier()  # torchrun ends all ranks with the first
    diloco_worker.join(shards, models["ddp"], wait_s=1.0)


def alone(shards: str) -> None:
    model, rank = plain(), dist.get_rank()
    with diloco_worker.join(shards, model, learner_id=f"rank-{rank}", island="alone", wait_s=20.0) as learner:
        dist.barrier()
        while learner.status()["contributions"]["merged"] < 2:
            learner.step(tokens=1)
            learner.poll(0.01)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"refused": refused, "alone": alone}[sys.argv[1]](sys.argv[2])
    dist.destroy_process_group()
