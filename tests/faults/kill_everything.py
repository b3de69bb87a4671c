"""SIGKILL of everything in the middle of a run; the same `diloco up` command then ends it: reliability.md 6.

    python tests/faults/kill_everything.py --times 2

Runs pairs, one undisturbed and one killed at the same time, so that both have the machine that the other has. Prints
held-out losses, and by how much their means differ, as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, variance
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from test_e2e_up import Up

from diloco_common.settings import ModelSettings
from diloco_demo.data import load_corpus
from diloco_demo.gpt import build_gpt, evaluate
from processes import TINY, until

SETTINGS = {
    "worker.checkpoint_every_s": 0.5,
    "worker.step_min_s": 0.02,  # one pace, also where others keep the machine busy
    "train.batch": 16,
    "sync.quorum": "all",  # where there are several
}


def run(folder: Path, tokens: int, kills: int, workers: int) -> float:
    """One run of 2 shards that is killed so often, evenly over its tokens. Returns its held-out loss."""
    for life in range(kills + 1):
        up = Up(folder, 2, workers, tokens, **SETTINGS)
        try:
            if life < kills:
                up.await_merging()
                goal = tokens * (life + 1) // (kills + 1)
                until(lambda goal=goal: merged(up) >= goal, "the moment to be killed", 300)  # type: ignore[misc]  # noqa: B023
                continue
            code, said = up.end(seconds=300)
        finally:
            up.kill()
        if code:
            raise RuntimeError(said)
    return held_out_loss(folder / "model.safetensors")


def merged(up: Up) -> int:
    """Tokens that every shard has merged."""
    return min(int(up.status(name)["tokens_merged"]) for name in up.shards)


def held_out_loss(exported: Path) -> float:
    """Nats per byte over all held-out text: ten times what a run evaluates by itself, so chance is less."""
    tiny = {name.removeprefix("model."): value for name, value in TINY.items() if name.startswith("model.")}
    shape = ModelSettings(**tiny)
    model = build_gpt(shape, seed=0)
    tensors = load_file(exported)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    text = load_corpus("stdlib", 0.05).held_out
    return evaluate(model, text, shape.context, batch=256, max_tokens=len(text))


def compare(undisturbed: Sequence[float], killed: Sequence[float]) -> dict[str, Any]:
    """Means, by what share the killed are worse, and from two pairs on the standard error of that share."""
    base = mean(undisturbed)
    found = {
        "undisturbed": round(base, 4),
        "killed": round(mean(killed), 4),
        "difference": round(mean(killed) / base - 1, 4),
    }
    if len(undisturbed) > 1:
        apart = [after / before - 1 for before, after in zip(undisturbed, killed, strict=True)]
        found["standard_error"] = round(math.sqrt(variance(apart) / len(apart)), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_600_000, help="budget of a run (default 1600000)")
    parser.add_argument(
        "--workers", type=int, default=1,
        help="of several, who begins first and meets whom makes more of a difference than a fault (default 1)",
    )  # fmt: skip
    parser.add_argument("--kills", type=int, default=1, help="how often everything is killed (default 1)")
    parser.add_argument("--times", type=int, default=1, help="how many pairs of runs (default 1)")
    args = parser.parse_args()
    losses: dict[int, list[float]] = {0: [], args.kills: []}
    for _ in range(args.times):
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as both:
            runs = {k: both.submit(run, Path(folder, str(k)), args.tokens, k, args.workers) for k in losses}
            for kills, found in losses.items():
                found.append(runs[kills].result())
                print(json.dumps({"kills": kills, "loss": round(found[-1], 4)}), flush=True)
    print(json.dumps(compare(losses[0], losses[args.kills])))


if __name__ == "__main__":
    main()
