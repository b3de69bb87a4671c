"""Your own model in your own loop. The six marked lines join a run, and leave it.

diloco-server --listen 127.0.0.1:50051 --set run.id=spirals --set run.tokens=200_000
python examples/own_loop.py 127.0.0.1:50051          # as many as you like, from anywhere
"""

import sys

import torch
from torch import nn

import diloco_worker  # 1


def spirals(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two spirals, and the spiral of each point."""
    label = torch.randint(0, 2, (n,), generator=generator)
    angle = 6 * torch.rand(n, generator=generator) + 0.5
    turn = angle + torch.pi * label
    points = torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 6
    return points + 0.02 * torch.randn(n, 2, generator=generator), label


def main(shards: str) -> None:
    model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with diloco_worker.join(shards, model, run="spirals") as learner:  # 2
        generator = torch.Generator().manual_seed(learner.seed)  # 3: every learner draws its own data
        while not learner.done:  # 4
            points, label = spirals(256, generator)
            loss = nn.functional.cross_entropy(model(points), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(points), loss=loss)  # 5
        learner.finish()  # 6: the model now holds the values of the run, the same in all learners

    points, label = spirals(4096, torch.Generator().manual_seed(0))
    accuracy = (model(points).argmax(1) == label).float().mean()
    print(f"{learner.learner_id}: {100 * accuracy:.1f} % of held-out points on the right spiral")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
