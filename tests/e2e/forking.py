"""A learner whose process has children, of every kind that scripts have: how many of them die?

    python tests/e2e/forking.py SHARDS TIMES WAY WAY...

runs the ways, then waits for a line on its standard input and runs them again, until there is none. Each time it says
what came of it as one line of JSON: way -> [children, deaths]. A spawned child imports this file, so torch is not
imported here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from diloco_server.core.cadence import Rest
    from diloco_worker import Learner

LIVES_S = 0.02
"""What a child lives for. gRPC's threads killed it in the first milliseconds."""
WORKERS = 2
BATCHES = 4


class Context(NamedTuple):
    learner: Learner
    step: Callable[[Any], None]
    """An inner step on a batch."""
    before: dict[bool, Any]
    """Loaders that were made, and used, before `join`; by whether their workers persist."""


def live() -> None:
    time.sleep(LIVES_S)


def fork(act: Callable[[], None]) -> int:
    """The exit code of a forked child that does this; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---------------------------------------------------------------- the ways of a loop of one's own


def by_fork(context: Context) -> int:
    return fork(live)


def by_fork_and_return(context: Context) -> int:
    """The child calls the learner, and goes the whole way out: `with`, atexit, destructors."""
    from diloco_common.errors import ChildOfLearner

    pid = os.fork()
    if pid == 0:
        live()
        with context.learner:
            try:
                context.learner.step(tokens=1)
            except ChildOfLearner:
                sys.exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def by_process(method: str) -> Callable[[Context], int]:
    def start(context: Context) -> int:
        child = multiprocessing.get_context(method).Process(target=live)
        child.start()
        child.join()
        return child.exitcode or 0

    return start


def by_subprocess(context: Context) -> int:
    return subprocess.run([sys.executable, "-S", "-c", "pass"], check=False).returncode


CHILD_BY_CHILD = {
    "os.fork": by_fork,
    "os.fork, and return": by_fork_and_return,
    "Process, fork": by_process("fork"),
    "Process, forkserver": by_process("forkserver"),
    "Process, spawn": by_process("spawn"),
    "subprocess": by_subprocess,
}


def count(start: Callable[[Context], int]) -> Callable[[Context, int], tuple[int, int]]:
    """A way in which children come one after the other, with an inner step between them."""

    def run(context: Context, times: int) -> tuple[int, int]:
        deaths = 0
        for _ in range(times):
            deaths += start(context) != 0
            context.step(None)
        return times, deaths

    return run


def loader(**options: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(data(), batch_size=32, num_workers=WORKERS, **options)


def data() -> Any:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.randn(32 * BATCHES, 16))


def epoch(context: Context, batches: Any) -> int:
    """Deaths in it: 0 or 1."""
    try:
        for (batch,) in batches:
            context.step(batch)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def loaders(*, persistent: bool = False, method: str = "fork") -> Callable[[Context, int], tuple[int, int]]:
    def run(context: Context, times: int) -> tuple[int, int]:
        deaths = 0
        for _ in range(-(-times // WORKERS)):
            made = loader(persistent_workers=persistent, multiprocessing_context=method)
            for _ in range(1 + persistent):
                deaths += epoch(context, made)
        return times, deaths

    return run


def loader_before(*, persistent: bool) -> Callable[[Context, int], tuple[int, int]]:
    def run(context: Context, times: int) -> tuple[int, int]:
        epochs = -(-times // WORKERS)
        deaths = sum(epoch(context, context.before[persistent]) for _ in range(epochs))
        return WORKERS if persistent else times, deaths

    return run


LOADERS = {
    "DataLoader, fork": loaders(),
    "DataLoader, fork, persistent": loaders(persistent=True),
    "DataLoader of before join, fork": loader_before(persistent=False),
    "DataLoader of before join, fork, persistent": loader_before(persistent=True),
    "DataLoader, forkserver": loaders(method="forkserver"),
    "DataLoader, spawn": loaders(method="spawn"),
}
WAYS = {**{name: count(start) for name, start in CHILD_BY_CHILD.items()}, **LOADERS}


def run_loop(shards: str, times: int, ways: list[str]) -> None:
    import torch
    from torch import nn

    import diloco_worker

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = {}
    if set(ways) & set(LOADERS):  # torch cannot return from a fork while a loader has workers
        before = {persistent: loader(persistent_workers=persistent) for persistent in (False, True)}
    for made in before.values():
        for _ in made:
            pass

    def step(batch: Any) -> None:
        loss = model(torch.ones(1, 16) if batch is None else batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=32, loss=loss)

    with diloco_worker.join(shards, model, learner_id="parent") as learner:
        context = Context(learner, step, before)
        for _ in passes():
            say({way: WAYS[way](context, times) for way in ways})


# ---------------------------------------------------------------- Trainers


def run_trainer(shards: str, times: int) -> None:
    """Of Hugging Face: a loader is asked for its workers once per epoch."""
    import torch
    from torch import Tensor, nn
    from transformers import Trainer, TrainingArguments

    from diloco_worker.hf import DilocoCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(16, 1))

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.get_submodule("0")(x).pow(2).mean()}

    examples = [{"x": torch.randn(16), "labels": torch.zeros(1)} for _ in range(32 * BATCHES)]
    arguments = TrainingArguments(
        "trainer", per_device_train_batch_size=32, num_train_epochs=times // WORKERS, dataloader_num_workers=WORKERS,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    for _ in passes():
        callback = DilocoCallback(shards, learner_id="trainer")
        say(
            {
                "Trainer of Hugging Face": trained(
                    Trainer(Model(), arguments, train_dataset=examples, callbacks=[callback]).train, times
                )
            }
        )


def run_lightning(shards: str, times: int) -> None:
    import torch
    from lightning import LightningModule, Trainer
    from torch import Tensor, nn

    from diloco_worker.lightning import DilocoCallback

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(16, 1))

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            return self.get_submodule("0")(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    for _ in passes():
        trainer = Trainer(
            max_epochs=times // WORKERS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[DilocoCallback(shards, learner_id="lightning")],
        )  # fmt: skip
        say({"Trainer of Lightning": trained(lambda: trainer.fit(Model(), loader()), times)})  # noqa: B023


def trained(train: Callable[[], object], times: int) -> tuple[int, int]:
    try:
        train()
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return times, 1
    return times, 0


TRAINERS = {"Trainer of Hugging Face": run_trainer, "Trainer of Lightning": run_lightning}

# ---------------------------------------------------------------- a shard

COUNTED = "FORKED_CHILDREN"
"""The file in which a shard counts: a letter for each child, "." or "x"."""


def cadence(rest: Rest) -> int:
    """A rule of `sync.cadence` that forks the shard, in its event loop."""
    with open(os.environ[COUNTED], "a") as counted:
        counted.write(".x"[fork(live) != 0])
    return rest.sync_every


# ---------------------------------------------------------------- the program


def passes() -> Iterator[None]:
    yield
    for _ in sys.stdin:
        yield


def say(counts: dict[str, tuple[int, int]]) -> None:
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    shards, times, *ways = sys.argv[1:]
    if ways[0] in TRAINERS:
        TRAINERS[ways[0]](shards, int(times))
    else:
        run_loop(shards, int(times), ways)
