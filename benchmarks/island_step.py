"""What an island costs a training loop: `learner.step` at each rank, also while a shard is frozen; bytes per rank.

    python benchmarks/island_step.py --ranks 1,2,4 --kind ddp --frozen 10

Prints one line of JSON for each number of ranks. Times are those of `learner.step` alone, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from light_learners import running_shard

STEP_S = 0.02
WIDTH = 256


def rank(kind: str, shards: str, seconds: float, out: str) -> None:
    """One rank: inner steps of about `STEP_S`, for so long."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import diloco_worker

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    calls: list[tuple[float, float]] = []
    with diloco_worker.join(shards, model, learner_id="island", island=dist.group.WORLD, wait_s=120.0) as learner:
        (Path(out) / f"{dist.get_rank()}.began").touch()
        for _ in range(int(seconds / STEP_S)):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            began = time.perf_counter()
            learner.step(tokens=4)
            calls.append((time.time(), 1e3 * (time.perf_counter() - began)))
            time.sleep(STEP_S)
        core, telemetry = learner.core, learner.telemetry
        assert core is not None
        local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
        versions = sum(f.version for f in core.fragments.values())
        said = {
            "calls": calls, "pushed": telemetry.bytes_pushed, "pulled": telemetry.bytes_pulled, "local": local,
            "versions": versions, "steps": core.inner_step,
        }  # fmt: skip
        (Path(out) / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def measure(kind: str, ranks: int, seconds: float, frozen_s: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder, running_shard("sync.sync_every=10", "sync.fragments=4") as shard:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
            "--rank", kind, shard.address, str(seconds), folder,
        ]  # fmt: skip
        run = subprocess.Popen(command)
        while len(list(Path(folder).glob("*.began"))) < ranks and run.poll() is None:
            time.sleep(0.05)
        time.sleep(seconds / 4)
        frozen_at = time.time()
        if frozen_s:
            os.kill(shard.pid, signal.SIGSTOP)
            time.sleep(frozen_s)
            os.kill(shard.pid, signal.SIGCONT)
        run.wait()
        said = [json.loads((Path(folder) / f"{i}.json").read_text()) for i in range(ranks)]
    frozen = sorted(ms for one in said for at, ms in one["calls"] if frozen_at < at < frozen_at + frozen_s)
    other = sorted(ms for one in said for at, ms in one["calls"] if not frozen_at < at < frozen_at + frozen_s)
    return {
        "kind": kind, "ranks": ranks, "steps": said[0]["steps"], "versions": said[0]["versions"],
        "step_ms": quantiles(other), "frozen_ms": quantiles(frozen),
        "pushed_per_version": [round(one["pushed"] / max(1, one["versions"])) for one in said],
        "pulled_per_version": [round(one["pulled"] / max(1, one["versions"])) for one in said],
        "local": [one["local"] for one in said],
    }  # fmt: skip


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {name: round(values[int(q * (len(values) - 1))], 2) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))}


def main() -> None:
    if "--rank" in sys.argv:
        rank(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--kind", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--frozen", type=float, default=10.0)
    args = parser.parse_args()
    for ranks in map(int, args.ranks.split(",")):
        print(json.dumps(measure(args.kind, ranks, args.seconds, args.frozen)), flush=True)


if __name__ == "__main__":
    main()
