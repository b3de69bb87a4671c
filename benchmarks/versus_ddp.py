"""torch DistributedDataParallel over Gloo in versus.py, started by torchrun on every machine.

Rank 0 writes a checkpoint every `SAVE_S` seconds to a disk that all machines share. Whoever is (re)started goes on from
it. That is how torchrun's own examples survive a death.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from versus_task import Task, Training

SAVE_S = 5.0


def work(task: Task, rank: int) -> None:
    dist.init_process_group("gloo")
    training = Training(task, rank)
    checkpoint = Path(task.folder, "checkpoint.pt")
    step, merged = 0, 0.0
    if checkpoint.exists():
        found = torch.load(checkpoint)
        training.model.load_state_dict(found["model"])
        training.optimizer.load_state_dict(found["optimizer"])
        step, merged = found["step"], found["merged"]
    model = DistributedDataParallel(training.model)
    first, saved = step, time.monotonic()

    def after_step(tokens: int, loss: Tensor) -> None:
        nonlocal step, merged, saved
        step += 1
        merged += tokens * dist.get_world_size()
        if dist.get_rank() == 0 and time.monotonic() - saved > SAVE_S:
            state = {
                "model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "step": step,
                "merged": merged,
            }  # fmt: skip
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
            saved = time.monotonic()

    training.run(forward=model, after_step=after_step, merged=lambda: merged, first_step=first)


if __name__ == "__main__":
    work(Task.load(sys.argv[3]), int(sys.argv[2]))
