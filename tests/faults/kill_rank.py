"""SIGKILL of a rank of an island again and again, at random moments, while torchrun restarts all ranks.

    for seed in 1 2 3 4 5; do
        python tests/faults/kill_rank.py --times 20 --seed $seed --kind ddp
        python tests/faults/kill_rank.py --times 20 --seed $seed --kind fsdp
    done | tee kills.jsonl

The island trains beside a learner of one process. It saves checkpoints, and goes on from the last whole one. Now and
then torchrun itself is ended, and started again with another number of ranks. At the end the histories of shard, island
and learner are judged: nothing torn is merged, no token counts twice. The shard never holds more for half contributions
than two whole ones take. Prints what happened, as a line of JSON.

Ranks are started and restarted by torchrun's own agent. It forks them instead of starting interpreters, which would
import torch for most of the time: on two cores a kill takes seconds then, not a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import psutil
from in_process import InProcessShard, LoopThread, settings_with
from training import Training

from diloco_common.codec import num_payload_bytes
from diloco_simulator.verify.histories import read_histories
from diloco_simulator.verify.judge import violations
from waiting import until

SIZES = (2, 3)
WIDTH = 500
"""Of the model: under DDP too every rank has a part of each fragment, which is a block of 256 elements at least."""
START_S = 1200.0
"""What takes longer than this hangs: torchrun starts all ranks anew, on a machine that may be busy."""
SAVE_EVERY = 20
"""Inner steps between two checkpoints."""
LOOK_S = 0.005
"""How often the shard's memory for half contributions is looked at."""
MERGED_MAX = 12
"""So many contributions of the island are merged between two kills, at most, that are waited for."""
ANEW = 0.2
"""How often torchrun itself is ended, and another number of ranks is started."""


@dataclass
class Outcome:
    """What was found; `violations` names everything that must not be."""

    seed: int
    kind: str
    kills: int = 0
    of_the_leader: int = 0
    restarts_with_other_ranks: int = 0
    rounds: int = 0
    contributions: int = 0
    of_the_island: int = 0
    half_bytes_max: int = 0
    """Held at once for half contributions, of one fragment."""
    whole_bytes: int = 0
    """Of a whole contribution to the largest fragment."""
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Island:
    """Ranks under torchrun, which say in a folder who they are once they train."""

    def __init__(self, folder: Path, shards: str, kind: str) -> None:
        self._folder, self._shards, self._kind = folder, shards, kind
        self._run: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self, ranks: int) -> None:
        self._starts += 1
        self.marks = self._folder / f"ranks-{self._starts}"
        self.marks.mkdir()
        self.size = ranks
        command = [
            sys.executable, __file__, "--agent", str(ranks), self._kind, self._shards, str(self._folder),
            str(self.marks),
        ]  # fmt: skip
        with (self._folder / f"log-{self._starts}").open("wb") as log:
            self._run = subprocess.Popen(command, stdout=log, stderr=log)

    def training(self) -> list[int]:
        """The pids of all ranks, by rank, if all of one start train."""
        found: dict[int, dict[int, int]] = {}
        for mark in self.marks.iterdir():
            count, rank, pid = map(int, mark.name.split("-"))
            found.setdefault(count, {})[rank] = pid
        newest = found[max(found)] if found else {}
        return [newest[rank] for rank in range(self.size)] if len(newest) == self.size else []

    def end(self) -> None:
        """As SIGKILL of the whole machine. torchrun is stopped first, or it would start more ranks meanwhile."""
        assert self._run is not None
        self._run.send_signal(signal.SIGSTOP)
        ranks = psutil.Process(self._run.pid).children(recursive=True)
        self._run.kill()
        self._run.wait()
        for process in ranks:  # each knows when it was made: a pid that is used again is not killed
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_rank(folder: Path, times: int, seed: int, kind: str = "ddp") -> Outcome:
    """Kill so many ranks of an island that trains in `folder`."""
    began, outcome, chance = time.monotonic(), Outcome(seed, kind), random.Random(seed)
    loop = LoopThread()
    sync = {"fragments": 3, "sync_every": 3, "quorum": 2, "push": "int8", "pull": "bfloat16"}
    settings = settings_with(run={"history": folder / "history"}, sync=sync, lease={"lease_s": 3.0})
    shard = InProcessShard(loop, settings).start()
    alone = Training(shard.address, "alone", seed=1, width=WIDTH, history=folder / "history")
    island = Island(folder, shard.address, kind)
    island.start(2)
    killed: list[int] = []

    def step() -> None:
        alone.step()
        time.sleep(0.02)

    async def watch() -> None:
        while True:
            outcome.half_bytes_max = max(outcome.half_bytes_max, half_bytes(shard))
            await asyncio.sleep(LOOK_S)

    watching = loop.begin(watch())

    def trains() -> Any:
        step()
        return island.training() and not set(killed) & set(island.training())

    def contributed(more: int) -> None:
        """Train until so many more contributions of the island are merged."""
        merged = shard.core.membership.get("island").merged + more

        def are_merged() -> bool:
            step()
            return shard.core.membership.get("island").merged >= merged

        until(are_merged, f"{more} more contributions of the island are merged", START_S)

    try:
        for _ in range(times):
            until(trains, "all ranks train", START_S)
            contributed(chance.randrange(MERGED_MAX))
            for _ in range(chance.randrange(60)):
                step()
            pids = island.training()
            victim = chance.randrange(len(pids))
            killed.append(pids[victim])
            kill(pids[victim])
            outcome.kills += 1
            outcome.of_the_leader += victim == 0
            if chance.random() < ANEW:
                island.end()
                island.start(chance.choice([size for size in SIZES if size != island.size]))
                outcome.restarts_with_other_ranks += 1
        until(trains, "all ranks train", START_S)
        contributed(1)
    finally:
        island.end()
        alone.learner.close()
        watching.cancel()
        shard.stop()
    ledger = shard.ledger
    outcome.rounds, outcome.contributions = ledger.rounds, ledger.participants
    outcome.of_the_island = shard.core.membership.get("island").merged
    outcome.whole_bytes = max(num_payload_bytes("int8", f.fragment.num_elements) for f in shard.core.fragments.values())
    outcome.violations = [f"{v.check}: {v.what}" for v in violations(read_histories(folder / "history"))]
    if outcome.half_bytes_max > 2 * outcome.whole_bytes:
        outcome.violations.append(f"{outcome.half_bytes_max} bytes were held for half contributions")
    outcome.seconds = round(time.monotonic() - began, 1)
    loop.close()
    return outcome


def half_bytes(shard: InProcessShard) -> int:
    """Held for half contributions to one fragment, at most."""
    rounds = [state.round for state in shard.core.fragments.values() if state.round is not None]
    return max((sum(half.num_bytes for half in r.halves.values()) for r in rounds), default=0)


def agent(ranks: int, kind: str, shards: str, folder: Path, marks: Path) -> None:
    """What `torchrun --standalone --max-restarts=1000` does, but that it forks the ranks."""
    import island_rank  # noqa: F401  (what ranks would import, each for itself)
    import torch._dynamo  # noqa: F401
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=marks.name, max_restarts=1000, monitor_interval=0.1, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, rank)(kind, shards, folder, marks)


def rank(kind: str, shards: str, folder: Path, marks: Path) -> None:
    import torch
    import torch.distributed as dist
    from island_rank import load, save, spread
    from training import tiny_model

    import diloco_worker

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's, from which this process was forked
    torch.set_num_threads(1)
    # Under a name of this start: else gloo would read where the ranks listened that were killed (torch 2.13).
    count, number, size = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(count, server), rank=int(number), world_size=int(size))
    model = spread(kind, tiny_model(width=WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    newest = folder / "newest"  # names the last checkpoint that is whole
    state = load(folder / newest.read_text(), model) if newest.exists() else None
    with diloco_worker.join(
        shards, model, learner_id="island", island=dist.group.WORLD, state=state, history=folder / "history",
        wait_s=60.0,
    ) as learner:  # fmt: skip
        (marks / f"{count}-{dist.get_rank()}-{os.getpid()}").touch()
        for step in itertools.count(1):
            if step % SAVE_EVERY == 0:
                name = f"saved-{marks.name}-{count}-{step}"
                save(folder / name, model, learner)
                if dist.get_rank() == 0:
                    (folder / "newest.part").write_text(name)
                    (folder / "newest.part").rename(newest)
            x = torch.randn(4, 4)
            (model(x) - x[:, :2].sin()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=4)
            time.sleep(0.01)


def main() -> None:
    if "--agent" in sys.argv:
        ranks, kind, shards, folder, marks = sys.argv[2:7]
        agent(int(ranks), kind, shards, Path(folder), Path(marks))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="ddp", choices=["ddp", "fsdp"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        outcome = kill_rank(Path(scratch), args.times, args.seed, args.kind)
    print(json.dumps(asdict(outcome)), flush=True)
    sys.exit(bool(outcome.violations))


if __name__ == "__main__":
    main()
