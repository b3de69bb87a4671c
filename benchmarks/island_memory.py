"""Memory of each rank of an island beyond its model, and bytes on the wire, beside what the formula says.

    python benchmarks/island_memory.py --params 300e6 --ranks 1,2,4        # FSDP2; needs about 20 bytes per parameter

The ranks train nothing: each step changes a 24th of their own rows, and sleeps. One fragment is due per H / 24 steps
(P = 24, H is `--every`). How many are under way at once follows from how long a round takes, in steps: `--step-s`.
Measured is the most that a rank's resident memory grew between its second and its last versions, over what it was
before `join`: in bytes per parameter that the rank holds. Prints one line of JSON for each number of ranks.

Exits with 1 if a rank held more than 10 bytes per parameter of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco_common.manifest import cut
from diloco_common.sizes import learner_bytes, shares
from light_learners import running_shard, tensors_of

FRAGMENTS = 24
CHANGE = 1e-4
MOST = 10.0
"""Bytes per local parameter."""


@dataclass
class Rank:
    """What one rank has measured, in bytes."""

    local: int
    """Parameters that it holds."""
    most: int
    """Its memory beyond the model."""
    pushed: int
    pulled: int
    versions: int
    """Applied, over all fragments, while it pushed and pulled so much."""
    under_way: int
    """Fragments with a contribution whose fate was not known: at once, at most."""


def rank(shards: str, params: float, steps: int, step_s: float, out: str) -> None:
    """One rank: joins, changes its rows for so many steps, and writes down what it took."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import diloco_worker
    from diloco_common.allocator import trim, tune_allocator
    from diloco_worker.joining import join
    from outer_round_learner import OwnMemory, Weights

    tune_allocator()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensors = tensors_of(int(params))
    model = fully_shard(Weights(tensors), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    flat = [p.to_local().view(-1) for p in model.parameters()]
    noise = torch.randn(1 << 16).mul_(CHANGE)
    trim()  # of what the whole model took before it was sharded
    memory = OwnMemory()

    def step(learner: diloco_worker.Learner, number: int) -> None:
        time.sleep(step_s)
        with torch.no_grad():
            for values in flat:
                size = -(-values.numel() // FRAGMENTS)
                for part in values[number % FRAGMENTS * size :][:size].split(noise.numel()):
                    part.add_(noise[: part.numel()])
        learner.step(tokens=1000)

    names = {t.name.replace(".", "_") for t in tensors if t.rule == "mean"}
    with join(
        shards, model, learner_id="island", island=dist.group.WORLD, mean_merge=names, wait_s=600.0, log=None
    ) as learner:
        assert learner.core is not None
        fragments, number = learner.core.fragments.values(), 0
        while any(f.version < 2 for f in fragments):  # versions are agreed on, so all ranks go on at the same step
            step(learner, number := number + 1)
        telemetry, before = learner.telemetry, sum(f.version for f in fragments)
        pushed, pulled = telemetry.bytes_pushed, telemetry.bytes_pulled
        under_way = 0
        memory.begin()
        for _ in range(steps):
            step(learner, number := number + 1)
            under_way = max(under_way, learner.core.unmerged)
        memory.end()
        said = Rank(
            sum(values.numel() for values in flat), memory.most, telemetry.bytes_pushed - pushed,
            telemetry.bytes_pulled - pulled, sum(f.version for f in fragments) - before, under_way,
        )  # fmt: skip
        Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(asdict(said)))
    dist.destroy_process_group()


def measure(params: float, ranks: int, steps: int, step_s: float, every: int) -> dict[str, object]:
    sync = f"sync.fragments={FRAGMENTS}", f"sync.sync_every={every}"
    with tempfile.TemporaryDirectory() as folder, running_shard(*sync) as shard:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__,
            "--rank", shard.address, str(params), str(steps), str(step_s), folder,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        said = [Rank(**json.loads(Path(folder, f"{i}.json").read_text())) for i in range(ranks)]
    manifest = cut(tensors_of(int(params)), FRAGMENTS, 1)
    most = max(one.under_way for one in said)
    formula = {n: learner_bytes(shares(manifest, ranks), under_way=n) for n in sorted({1, 2, most})}
    return {
        "ranks": ranks, "every": every, "params": manifest.num_elements, "local": [one.local for one in said],
        "under_way": most, "bytes_per_local": [round(one.most / one.local, 2) for one in said],
        "formula_per_local": {n: round(found.per_element, 2) for n, found in formula.items()},
        "pushed_per_version_of_all": [round(one.pushed / one.versions * FRAGMENTS) for one in said],
        "pulled_per_version_of_all": [round(one.pulled / one.versions * FRAGMENTS) for one in said],
        "formula_pushed": formula[1].pushed, "formula_pulled": formula[1].pulled, "versions": said[0].versions,
    }  # fmt: skip


def main() -> int:
    if "--rank" in sys.argv:
        shards, params, steps, step_s, out = sys.argv[2:7]
        rank(shards, float(params), int(steps), float(step_s), out)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=float, default=300e6)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--steps", type=int, default=72, help="measured, once every fragment has two versions")
    parser.add_argument("--step-s", type=float, default=0.2, help="what a step takes, in seconds")
    parser.add_argument("--every", type=int, default=FRAGMENTS, help="inner steps between two rounds of a fragment")
    args = parser.parse_args()
    is_good = True
    for ranks in map(int, args.ranks.split(",")):
        found = measure(args.params, ranks, args.steps, args.step_s, args.every)
        print(json.dumps(found), flush=True)
        is_good = is_good and max(found["bytes_per_local"]) <= MOST  # type: ignore[call-overload]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
