"""The zoo: ordinary training programs, each run as learners that die and come back, and alone.

A program is one file. Lines that end in `# diloco` are what it takes to be a learner: without them it is a program of
one process (`alone`), so they can be counted. Its last line of output says what its model is worth, on data that nobody
trained on. `make_model` and `evaluate` are called by others as well (look.py).

`keep` runs one: two shards, three learners, one learner and one shard killed and started again, the pulled model loaded
strictly. Whatever else ends, or says that something is wrong, ends it with `AssertionError`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import forks
from forks import Forked
from processes import LocalCluster, environment, until, versions

PROGRAMS = Path(__file__).parent / "programs"
MARK = re.compile(r"\s# diloco$")
HIGHER_IS_BETTER = ("accuracy", "return")
"""Metrics; of all others, lower ones are."""
LEARNERS = 3
SHARDS = 2
WAIT_S = 600.0
PACE_S = 0.02
"""What a step of a learner takes longer (become.py)."""
WRONG = ("Traceback (most recent call last)", "not everything is of the last version", "same losses", "NOT_FINITE")
"""What no log may say."""
SETTINGS: dict[str, Any] = {"sync.fragments": 4, "sync.sync_every": 24, "lease.lease_s": 6, "lease.heartbeat_s": 1}
"""The defaults, in the place of those of other tests (processes.TINY), but for the number of fragments."""


@dataclass(frozen=True)
class Program:
    name: str
    about: str
    steps: int
    """Of a learner, or of one process."""
    batch: int
    """Of a learner; one process with the same data has three times that."""
    per_sample: int = 1
    """What a sample counts for: tokens, where the program counts tokens."""
    based: bool = False
    """Some of its tensors are not shared: `diloco pull` needs `--base`."""
    splits: bool = False
    """It can be given unequal data."""
    needs: str = ""
    """What it takes to install, beyond what the tests have: `pip install` of this."""

    @property
    def path(self) -> Path:
        return PROGRAMS / f"{self.name}.py"

    @property
    def is_here(self) -> bool:
        return not self.needs or find_spec(self.needs.replace("-", "_")) is not None

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @property
    def added(self) -> int:
        return sum(bool(MARK.search(line)) for line in self.lines)

    def alone(self, folder: Path) -> Path:
        """The same program without these lines."""
        path = folder / f"{self.name}.py"
        path.write_text("\n".join(line for line in self.lines if not MARK.search(line)) + "\n")
        return path


ZOO = (
    Program("vision", "BatchNorm, loader workers, EMA swapped in", 900, 32, splits=True),
    Program("gan", "two models, two optimizers", 1200, 64),
    Program("ppo", "actor and critic, PPO", 600, 64),
    Program("moco", "contrastive; queue and key encoder are private", 700, 64, based=True),
    Program("recommender", "sparse tables, SparseAdam", 1000, 128),
    Program("moe", "two of eight experts", 800, 64),
    Program("lora", "adapters by peft", 800, 32, based=True),
    Program("hf_trainer", "Trainer of Hugging Face, loader workers", 500, 16, per_sample=32),
    Program("lightning_trainer", "Trainer of Lightning, loader workers", 600, 64),
    Program("trl_sft", "SFTTrainer, completions alone count", 300, 32, per_sample=8, needs="trl"),
    Program("sentence_head", "a classifier in the loss: `join` has the loss", 600, 32, needs="sentence-transformers"),
    Program("sb3_dqn", "DQN; the target network is private", 5000, 64, based=True, needs="stable-baselines3"),
    Program("x_transformer", "rotary positions, wrapped twice", 400, 16, per_sample=32, needs="x-transformers"),
    Program("diffusion", "UNet and scheduler of diffusers", 300, 16, needs="diffusers"),
    Program("gcn", "two graph convolutions, full batches", 400, 60, needs="torch-geometric"),
)


@dataclass
class Found:
    """What came of one program; metrics as the program has them."""

    name: str
    metric: str
    added: int
    unequal: bool
    pulled: float
    learners: list[float]
    versions: int
    """Of the fragment that has the fewest."""
    larger: float | None = None
    """One process, the same data, three times the batch."""
    third: float | None = None
    """One process, a third of the data."""

    @property
    def worst(self) -> float:
        return min(self.learners) if self.metric in HIGHER_IS_BETTER else max(self.learners)

    @property
    def mean(self) -> float:
        """Of what the learners' own models are worth, each by itself."""
        return sum(self.learners) / len(self.learners)

    @property
    def behind(self) -> float:
        """By how much the pulled model is worse than the worst learner, as a share; negative: it is better."""
        difference = self.worst - self.pulled if self.metric in HIGHER_IS_BETTER else self.pulled - self.worst
        return difference / abs(self.worst)

    @property
    def holds(self) -> bool:
        """The pulled model is no worse than the worst learner by more than 1 %."""
        return self.behind <= 0.01


def keep(
    program: Program, folder: Path, *, steps: int | None = None, learners: int = LEARNERS, shards: int = SHARDS,
    unequal: bool = False, kills: bool = True, seed: int = 0, pace_s: float = PACE_S,
    settings: Mapping[str, object] | None = None,
) -> Found:  # fmt: skip
    """Train as learners until the budget is merged, pull, and evaluate. Raises AssertionError."""
    steps = steps or program.steps
    budget = learners * steps * program.batch * program.per_sample
    given = {**SETTINGS, "run.tokens": budget, **(settings or {})}
    arguments = ["--steps", "1000000", "--batch", str(program.batch), "--seed", str(seed)]
    arguments += ["--unequal", "1"] if unequal else []
    with LocalCluster(folder, given, keeps=True) as cluster, herd(folder) as started:
        cluster.start(shards, [])
        addresses = ",".join(shard.endpoints.grpc for shard in cluster.shards)

        def learner(log: str) -> Forked:
            """Its name is the first letter of that of its log."""
            whereabouts = environment() | {"SHARDS": addresses, "LEARNER": log[0]}
            return started.begin(log, program.path, arguments, whereabouts, pace_s)

        alive = {name: learner(name) for name in "abcdefgh"[:learners]}

        def merged(share: float) -> bool:
            for name, process in alive.items():
                code = process.poll()
                assert code is None or cluster.shards[0].status()["done"], f"{name}: {code}\n{started.said(name)}"
            return min(shard.status()["tokens_merged"] for shard in cluster.shards) >= share * budget

        if kills:
            until(lambda: merged(0.2), f"{program.name}: the first fifth", WAIT_S)
            before, dead = cluster.learner("b"), alive.pop("b")
            dead.kill()
            assert dead.wait(WAIT_S) == -signal.SIGKILL, f"b ended by itself:\n{started.said('b')}"
            alive["b, again"] = learner("b, again")
            until(lambda: merged(0.5), f"{program.name}: half", WAIT_S)
            until(lambda: merged(0.0) and is_back(cluster.learner("b"), before), f"{program.name}: b is back", WAIT_S)
            assert not cluster.shards[0].status()["done"], "too short: the run ended before a shard could be killed"
            cluster.shards[1].kill()
            cluster.shards[1].start()
        for name, process in alive.items():
            code = process.wait(WAIT_S)
            assert code == 0, f"{name} ended with {code}:\n{started.said(name)}"
        pulled = pull(program, folder, addresses, started)
        made = [version for shard in cluster.shards for version in versions(shard.status()).values()]
        for shard in cluster.shards:
            assert shard.status()["done"]
            shard.signal(signal.SIGTERM)
            assert shard.exit_code() == 0, shard.said()
        for said in (*map(started.said, alive), *(shard.said() for shard in cluster.shards)):
            assert not any(words in said for words in WRONG), said
        worth = [started.worth(name) for name in alive]
    metric = worth[0][0]
    return Found(program.name, metric, program.added, unequal, pulled, [value for _, value in worth], min(made))


def is_back(learner: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether it trains, in another life than before."""
    return bool(learner["generation"] != before["generation"] and learner["inner_step"] > 0)


def pull(program: Program, folder: Path, shards: str, started: Herd) -> float:
    """What the global model is worth, once it is loaded strictly."""
    base = []
    if program.based:
        started.run("base", Path(__file__).parent / "look.py", [str(program.path), str(folder / "base"), "--first"])
        base = ["--base", str(folder / "base")]
    out = folder / "pulled"
    process = Forked(
        "diloco_deploy", ["pull", "--shards", shards, "--out", str(out), *base], folder / "logs/pull.log", environment()
    )
    assert process.wait(WAIT_S) == 0, (folder / "logs/pull.log").read_text()
    started.run("look", Path(__file__).parent / "look.py", [str(program.path), str(out)])
    return started.worth("look")[1]


def by_itself(
    program: Program, folder: Path, times: int, *, steps: int | None = None, unequal: bool = False, seed: int = 0
) -> float:
    """What a single process comes to, with a batch `times` as large; once: on a third of the data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    name = f"alone-{times}"
    arguments = ["--steps", str(steps or program.steps), "--batch", str(times * program.batch), "--seed", str(seed)]
    if '"part"' in program.path.read_text() and times == 1:
        arguments += ["--part", "0"]
    arguments += ["--unequal", "1"] if unequal else []
    with herd(folder) as started:
        started.run(name, program.alone(folder), arguments)
        return started.worth(name)[1]


class Herd:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[Forked] = []

    def begin(
        self, name: str, path: Path, arguments: Sequence[str], given: dict[str, str] | None = None, pace_s: float = 0.0
    ) -> Forked:
        process = Forked("become", [str(pace_s), str(path), *arguments], self._log(name), given or environment())
        self.all.append(process)
        return process

    def run(self, name: str, path: Path, arguments: Sequence[str]) -> None:
        code = self.begin(name, path, arguments).wait(WAIT_S)
        assert code == 0, f"{name} ended with {code}:\n{self.said(name)}"

    def said(self, name: str) -> str:
        return self._log(name).read_text()

    def worth(self, name: str) -> tuple[str, float]:
        """The metric that it printed last, and its value."""
        lines = [line for line in self.said(name).splitlines() if line.startswith('{"')]
        assert lines, f"{name} has not said what its model is worth:\n{self.said(name)}"
        ((metric, value),) = json.loads(lines[-1]).items()
        return metric, float(value)

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"


@contextmanager
def herd(folder: Path) -> Iterator[Herd]:
    """What is left of it at the end is killed."""
    started = Herd(folder)
    try:
        yield started
    finally:
        for process in started.all:
            process.kill()
            process.wait(30)


def preload(programs: Sequence[Program]) -> None:
    """Import once what these programs import, as that takes longer than they do."""
    names = {"transformers.trainer": "hf_trainer", "lightning.pytorch": "lightning_trainer", "peft": "lora"}
    wanted = [module for module, name in names.items() if any(program.name == name for program in programs)]
    forks.context.set_forkserver_preload(
        ["diloco_server.shell.server", "diloco_worker.joining", "torch._dynamo", *wanted]
    )
    os.environ["OMP_NUM_THREADS"] = "1"
