"""Makes the folder that a new user begins with: run.toml and train.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from diloco_common.errors import ConfigError

RUN_TOML = """\
# The settings of one run. `diloco config show --config run.toml --origin` shows all of them, and where each is from.
# Later wins: defaults, this file, variables such as DILOCO_SYNC__QUORUM, --set sync.quorum=2, options.

[run]
id = "{run}"                # learners and shards of other runs are refused
tokens = 200_000            # the run ends when so many tokens are merged; 2M and 1.5e9 will do, as text: "2M"

[sync]
fragments = 4               # the model is cut into so many, each synchronised on its own
sync_every = 24             # inner steps between two rounds of a fragment
quorum = 1                  # contributions that let a round close

[cluster]                   # of `diloco up` alone, which trains the built-in model
shards = 2
workers = 2
"""

TRAIN_PY = '''\
"""A model of your own in a loop of your own. It joins the run of run.toml, on as many machines as you like.

    diloco-server --config run.toml --listen 127.0.0.1:50051 &
    python train.py 127.0.0.1:50051
    kill %1                      # the shard serves the model until it is told to end
"""

import sys

import torch
from torch import nn

import diloco_worker


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two spirals, and the spiral of each point. Put your own data here."""
    label = torch.randint(0, 2, (size,), generator=generator)
    angle = 6 * torch.rand(size, generator=generator) + 0.5
    turn = angle + torch.pi * label
    points = torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 6
    return points + 0.02 * torch.randn(size, 2, generator=generator), label


def main(shards: str) -> None:
    # Put your own model and optimizer here.
    model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with diloco_worker.join(shards, model, run="{run}") as learner:
        generator = torch.Generator().manual_seed(learner.seed)  # every learner draws its own data
        while not learner.done:
            points, label = batch(256, generator)
            loss = nn.functional.cross_entropy(model(points), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(points), loss=loss)  # never waits for the network
        learner.finish()  # the model now holds the values of the run, the same in all learners

    points, label = batch(4096, torch.Generator().manual_seed(0))
    accuracy = (model(points).argmax(1) == label).float().mean()
    print(f"{{learner.learner_id}}: {{100 * accuracy:.1f}} % of held-out points on the right spiral")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
'''


def make_project(folder: Path) -> str:
    """Write the files, none over another, and return what to do next. Raises ConfigError."""
    run = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name)[:64] or "local"
    files = {"run.toml": RUN_TOML.format(run=run), "train.py": TRAIN_PY.format(run=run)}
    for name in files:
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} is there already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    there = shlex.quote(str(folder))
    return (
        f"{folder}: run.toml and train.py\n"
        f"go there:                cd {there}\n"
        f"try the built-in model:  diloco up --config run.toml    # and, from another terminal: diloco status\n"
        f"train your own:          diloco-server --config run.toml --listen 127.0.0.1:50051 &\n"
        f"                         python train.py 127.0.0.1:50051\n"
        f"                         kill %1    # ends the shard; until then it serves the model"
    )
