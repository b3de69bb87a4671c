"""Two processes train one model with DistributedDataParallel, and are one learner: an island.

diloco-server --listen 127.0.0.1:50051 --set run.id=spirals --set run.tokens=60_000
torchrun --nproc-per-node=2 examples/ddp.py 127.0.0.1:50051          # as many as you like, from anywhere

On GPUs: init_island() without "gloo", and the model on cuda:LOCAL_RANK.
"""

import sys

import torch
import torch.distributed as dist
from own_loop import spirals
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import diloco_worker


def main(shards: str) -> None:
    diloco_worker.init_island("gloo")
    generator = torch.Generator()  # every rank draws its own data
    generator.seed()
    net = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with diloco_worker.join(shards, model, run="spirals", island=dist.group.WORLD) as learner:
        while not learner.done:  # true on all ranks after the same step
            points, label = spirals(128, generator)
            loss = nn.functional.cross_entropy(model(points), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(points), loss=loss)  # this rank's tokens; the island sums
        learner.finish()  # called on all ranks: the model now holds the values of the run

    if dist.get_rank() == 0:
        points, label = spirals(4096, generator)
        accuracy = (net(points).argmax(1) == label).float().mean()
        print(f"{learner.learner_id}: {100 * accuracy:.1f} % of held-out points on the right spiral")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
