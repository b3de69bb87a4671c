"""A loop that can be killed at any moment, and continues where it was: its own checkpoint holds the learner's state.

diloco-server --listen 127.0.0.1:50051 --set run.id=spirals --set run.tokens=200_000
python examples/resume.py 127.0.0.1:50051 runs/resume.pt 200     # as if it were killed after 200 steps
python examples/resume.py 127.0.0.1:50051 runs/resume.pt         # continues to the end of the run, and evaluates
"""

import sys
from pathlib import Path

import torch
from own_loop import spirals
from torch import nn

import diloco_worker


def main(shards: str, checkpoint: Path, steps: float) -> None:
    model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved = torch.load(checkpoint) if checkpoint.exists() else {}
    if saved:  # before `join`: from then on the values belong to optimizer and learner
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    with diloco_worker.join(shards, model, run="spirals", state=saved.get("learner")) as learner:
        print(f"{learner.learner_id} begins at step {learner.inner_step}")
        schedule = diloco_worker.ProgressLR(optimizer, learner, "cosine")
        if saved:
            schedule.load_state_dict(saved["schedule"])
        generator = torch.Generator().manual_seed(learner.seed)
        if saved:
            generator.set_state(saved["data"])
        while not learner.done:
            points, label = spirals(256, generator)
            loss = nn.functional.cross_entropy(model(points), label)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            learner.step(tokens=len(points), loss=loss)
            if learner.inner_step % 50 == 0:
                parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "learner": learner}
                states = {name: part.state_dict() for name, part in parts.items()}
                save(checkpoint, states | {"data": generator.get_state()})
            if learner.inner_step == steps:
                return
        learner.finish()

    torch.save(model.state_dict(), checkpoint.with_name("final.pt"))
    points, label = spirals(4096, torch.Generator().manual_seed(0))
    accuracy = (model(points).argmax(1) == label).float().mean()
    print(f"{learner.learner_id}: {100 * accuracy:.1f} % of held-out points on the right spiral")


def save(path: Path, content: dict[str, object]) -> None:
    """Write atomically: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    shards, checkpoint, steps = [*sys.argv[1:], *["127.0.0.1:50051", "runs/resume.pt", "inf"][len(sys.argv) - 1 :]]
    main(shards, Path(checkpoint), float(steps))
