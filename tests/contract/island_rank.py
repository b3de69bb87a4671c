"""One rank of an island, by torchrun or forked: trains a small model, and writes what came of it into a folder."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import diloco_worker


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 33), nn.Tanh(), nn.Linear(33, 3))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.Linear(33, 3))


def spread(kind: str, model: nn.Module) -> nn.Module:
    """As `kind` says, over all ranks."""
    size = dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "mixed" else MixedPrecisionPolicy()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def whole(model: nn.Module) -> Tensor:
    """All parameters, float32."""
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().float().flatten() for p in parts])


def batch(step: int, size: int = 16) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(step))


def load(checkpoint: Path, model: nn.Module) -> dict[str, Any]:
    """Values into the model, whatever number of ranks has saved them; and the learner's state."""
    saved = {"model": get_model_state_dict(model), "learner": diloco_worker.blank_state()}
    if checkpoint.exists():
        dcp.load(saved, checkpoint_id=checkpoint)
        set_model_state_dict(model, saved["model"])
    return saved["learner"]


def save(checkpoint: Path, model: nn.Module, learner: diloco_worker.Learner) -> None:
    dcp.save({"model": get_model_state_dict(model), "learner": learner.state_dict()}, checkpoint_id=checkpoint)


def train(
    out: Path, kind: str, shards: str, steps: int, learner_id: str, sleep_s: float, checkpoint: Path | None = None
) -> None:
    """`checkpoint`: go on from it, if it is there, and leave one at the end. Else the learner finishes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind, _, norm = kind.partition("+")
    model = spread(kind, normed() if norm else plain(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    calls = []
    state = None if checkpoint is None else load(checkpoint, model)
    loaded = whole(model).tolist()
    with diloco_worker.join(
        shards, model, learner_id=learner_id, island=dist.group.WORLD, wait_s=120.0, state=state,
        history=None if checkpoint is None else out / "history",
    ) as learner:  # fmt: skip
        first = whole(model)
        for step in range(steps):
            x = batch(step)[rank::size]
            loss = (model(x) - x[:, :3].sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            began = time.perf_counter()
            learner.step(tokens=len(x), loss=loss)
            calls.append(time.perf_counter() - began)
            if learner.done:
                break
            time.sleep(sleep_s)
        core = learner.core
        assert core is not None
        said = {
            "rank": rank,
            "steps": core.inner_step,
            "tokens": core.tokens,
            "contributions": dict(core.contributions),
            "versions": {i: f.version for i, f in core.fragments.items()},
            "pushed": learner.telemetry.bytes_pushed,
            "pulled": learner.telemetry.bytes_pulled,
            "alive": learner.learners_alive,
            "is_watched": learner._watch is not None,
            "median_ms": 1e3 * sorted(calls)[len(calls) // 2],
            "first": first.tolist(),
            "values": whole(model).tolist(),
            "loaded": loaded,
            "state": learner.state_dict(),
            "local": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters()),
        }
        if checkpoint is None:
            said["is_whole"] = bool(learner.finish())
            said["final"] = whole(model).tolist()
            said["buffers"] = [buffer.tolist() for buffer in model.buffers()]
        else:
            save(checkpoint, model, learner)
        (out / f"{rank}.json").write_text(json.dumps(said))


def forked(environment: Mapping[str, str], *arguments: str) -> None:
    """A rank that forks.py has started."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    main(arguments)


def main(arguments: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    out, kind, shards, steps, learner_id, sleep_s, *saved = arguments
    train(Path(out), kind, shards, int(steps), learner_id, float(sleep_s), *map(Path, saved))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
