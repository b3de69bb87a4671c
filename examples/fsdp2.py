"""Two processes train one sharded model with FSDP2 (fully_shard), and are one learner: an island.

diloco-server --listen 127.0.0.1:50051 --set run.id=spirals --set run.tokens=60_000
torchrun --nproc-per-node=2 examples/fsdp2.py 127.0.0.1:50051        # as many as you like, from anywhere

On GPUs: init_island() without "gloo", and a mesh of "cuda". No rank moves or holds more than its rows.
"""

import sys

import torch
import torch.distributed as dist
from own_loop import spirals
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import diloco_worker


def main(shards: str) -> None:
    diloco_worker.init_island("gloo")
    generator = torch.Generator()  # every rank draws its own data
    generator.seed()
    torch.manual_seed(0)  # but all ranks build the same model, and each keeps its rows
    model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with diloco_worker.join(shards, model, run="spirals", island=mesh) as learner:
        while not learner.done:  # true on all ranks after the same step
            points, label = spirals(128, generator)
            loss = nn.functional.cross_entropy(model(points), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(points), loss=loss)  # this rank's tokens; the island sums
        learner.finish()  # called on all ranks: the model now holds the values of the run

    points, label = spirals(4096, generator)
    accuracy = (model(points).argmax(1) == label).float().mean()  # every rank: the forward pass gathers the rows
    if dist.get_rank() == 0:
        print(f"{learner.learner_id}: {100 * accuracy:.1f} % of held-out points on the right spiral")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
