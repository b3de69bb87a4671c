"""SIGKILL of everything in the middle of a run; the same `diloco up` command then ends it: faults.md 6.

    python tests/faults/kill_everything.py --tokens 800000 --times 2

Runs it undisturbed first, and prints both held-out losses as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from processes import until
from test_e2e_up import Up

SETTINGS = {
    "worker.checkpoint_every_s": 0.5,
    "worker.step_delay_s": 0.005,
    "train.batch": 16,
    "sync.quorum": "all",  # else who meets whom in a round makes more of a difference than any fault
}


def run(folder: Path, tokens: int, kills: int, **settings: object) -> dict[str, Any]:
    """One run of 2 shards and 2 workers that is killed so often, evenly over its tokens. Returns its report."""
    for life in range(kills + 1):
        up = Up(folder, 2, 2, tokens, **{**SETTINGS, **settings})
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
    return dict(json.loads((folder / "report.json").read_text()))


def merged(up: Up) -> int:
    """Tokens that every shard has merged."""
    return min(int(up.status(name)["tokens_merged"]) for name in up.shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=800_000, help="budget of a run (default 800000)")
    parser.add_argument("--kills", type=int, default=1, help="how often everything is killed (default 1)")
    parser.add_argument("--times", type=int, default=1, help="how many pairs of runs (default 1)")
    args = parser.parse_args()
    pairs = []
    for _ in range(args.times):
        with tempfile.TemporaryDirectory() as folder:
            losses = [run(Path(folder, str(kills)), args.tokens, kills)["eval_loss_final"] for kills in (0, args.kills)]
        undisturbed, killed = losses
        pairs.append({"undisturbed": undisturbed, "killed": killed, "difference": killed / undisturbed - 1})
        print(json.dumps(pairs[-1]), flush=True)


if __name__ == "__main__":
    main()
