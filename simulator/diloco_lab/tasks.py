"""Training tasks: a model, its data, its loss, its inner optimizer, and its evaluation; and references to compare with.

References (classic DiLoCo, data-parallel) share no code with shard or learner, except the task and the learning-rate
schedule. Their progress is the share of tokens trained so far. Each returns the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from diloco_common.errors import ConfigError
from diloco_common.extensions import find, is_extension
from diloco_common.settings import Settings
from diloco_demo import training
from diloco_demo.data import Corpus, TokenStream, load_corpus
from diloco_demo.gpt import GPT, build_gpt, evaluate
from diloco_demo.training import CLIP, share_at
from diloco_lab.arms import decays_of
from diloco_lab.stacked import Stack
from diloco_worker.core.momentum import Companion, Companions
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell.optimizers import inner_of

EVALUATION_TOKENS = 131_072
CURVE_TOKENS = EVALUATION_TOKENS // 8


class Stream(Protocol):
    """The data of one learner."""

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one inner step. The elements of the inputs count as its tokens."""


class Task(Protocol):
    """Everything needed to train a model. Equal seeds give equal values and equal data."""

    tokens_per_batch: int

    def model(self) -> nn.Module:
        """A model with initial values, on the CPU."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer for one learner. A group's learning rate is `lr_highest`, or else `lr`, times the schedule."""

    def stream(self, learner: int, learners: int) -> Stream: ...

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """A scalar."""

    def evaluate(self, model: nn.Module, half: int, tokens: int) -> float:
        """The loss on this many tokens of one half of the held-out data: 0 selects, 1 is reported."""


@runtime_checkable
class Stackable(Protocol):
    """A task that can step all learners at once, which is faster."""

    def stack(self, models: Sequence[nn.Module]) -> Stack | None:
        """Turn the models into views of a stack. None: step them one by one."""


Build = Callable[[Settings, float], Task]
"""Makes a task. The number says how much learners' data differ. 0: all draw from all data. 1: each has its own part."""


class BuiltIn:
    """The built-in GPT over bytes."""

    def __init__(self, settings: Settings, non_iid: float = 0.0, corpus: Corpus | None = None) -> None:
        self.settings, self._non_iid = settings, non_iid
        self.tokens_per_batch = settings.train.batch * settings.model.context
        self._corpus = corpus or corpus_of(settings)

    def model(self) -> nn.Module:
        return build_gpt(self.settings.model, self.settings.run.seed)

    def stack(self, models: Sequence[nn.Module]) -> Stack | None:
        """All learners as one. None if their optimizer is an extension, or if a subclass may have changed the task."""
        gpts, train = [model for model in models if type(model) is GPT], self.settings.train
        if type(self) is not BuiltIn or len(gpts) < max(2, len(models)) or is_extension(train.optimizer):
            return None
        return Stack(gpts, train)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return training.make_optimizer(model, self.settings.train, decays_of(self.settings.train))

    def stream(self, learner: int, learners: int) -> Stream:
        settings = self.settings
        return TokenStream(
            part_of(self._corpus.train, learner, learners, self._non_iid), learner_id=f"worker-{learner}",
            seed=settings.run.seed, context=settings.model.context, batch=settings.train.batch,
        )  # fmt: skip

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model.loss(inputs, targets)  # type: ignore[operator]
        return loss

    def evaluate(self, model: nn.Module, half: int, tokens: int) -> float:
        return evaluate(model, half_of(self._corpus, half), self.settings.model.context, max_tokens=tokens)  # type: ignore[arg-type]


def inner_step(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, share: float,
    clip: float,
) -> Tensor:  # fmt: skip
    """Forward, backward, clip, and a step at this share of the highest rates. Returns the detached loss."""
    loss = task.loss(model, inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("lr_highest", group["lr"]) * share
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def part_of(text: Tensor, learner: int, learners: int, non_iid: float) -> Tensor:
    """The data of one learner: from all of the text (0) to one of `learners` consecutive parts (1)."""
    size = round(len(text) * (1 - non_iid * (1 - 1 / learners)))
    begin = 0 if learners == 1 else round((len(text) - size) * learner / (learners - 1))
    return text[begin : begin + size]


def builder(name: str) -> Build:
    """The function named by `mypkg.mymod:build`; "" is the built-in model. Raises ConfigError."""
    if not name:
        return BuiltIn
    if not is_extension(name):
        raise ConfigError(f"--model {name!r} is not of the form mypkg.mymod:build")
    build: Build = find("diloco.task", name).thing
    return build


def half_of(corpus: Corpus, half: int) -> Tensor:
    """Half of the held-out data: 0 selects, 1 is reported."""
    middle = len(corpus.held_out) // 2
    return corpus.held_out[middle:] if half else corpus.held_out[:middle]


def corpus_of(settings: Settings) -> Corpus:
    """The corpus, read only once."""
    return _corpus(settings.data.source)


@cache
def _corpus(source: str) -> Corpus:
    return load_corpus(source)


class InnerSteps:
    """Models, optimizers and data of the learners, by index."""

    def __init__(self, settings: Settings, task: Task, learners: int) -> None:
        self.models = [task.model() for _ in range(learners)]
        self._average = settings.train.average_momentum
        self._task = task
        self._streams = [task.stream(i, learners) for i in range(learners)]
        self._stack = task.stack(self.models) if isinstance(task, Stackable) else None
        self._optimizers = [] if self._stack else [task.optimizer(model) for model in self.models]
        self.kind = inner_of(self._optimizers[:1] or [task.optimizer(task.model())])
        """How learners describe their optimizer to shards."""
        self._done: dict[int, tuple[float, int]] = {}  # learner -> loss and tokens of its next step
        self._gone: set[int] = set()

    def step(self, index: int, share_of: Callable[[int], float]) -> tuple[float, int]:
        """Take one learner's step. Returns its loss and tokens. `share_of`: index -> share of the highest rates."""
        if index not in self._done:
            rows = [index]
            if self._stack is not None:
                rows = [row for row in range(len(self.models)) if row not in self._done and row not in self._gone]
            batches = [self._streams[row].next_batch() for row in rows]
            shares = [share_of(row) for row in rows]
            inputs, targets = (torch.stack(tensors) for tensors in zip(*batches, strict=True))
            if self._stack is not None:
                chosen = None if len(rows) == len(self.models) else torch.tensor(rows)
                losses = self._stack.step(chosen, inputs, targets, torch.tensor(shares)).tolist()
            else:
                model, optimizer = self.models[index], self._optimizers[index]
                loss = inner_step(self._task, model, optimizer, inputs[0], targets[0], shares[0], training.CLIP)
                losses = [float(loss)]
            self._done |= {row: (loss, inputs[0].numel()) for row, loss in zip(rows, losses, strict=True)}
        return self._done.pop(index)

    def companions(self, index: int) -> Mapping[str, Companion]:
        """The first moments of a living learner that are averaged, by parameter."""
        if not self._average:
            return {}
        if self._stack is not None:
            return self._stack.companions(index)
        return Companions(self._optimizers[index], SharedSet(self.models[index])).by_name

    def leave(self, index: int) -> None:
        """A learner is gone; drop the step that was calculated ahead."""
        self._gone.add(index)
        self._done.pop(index, None)

    def begin(self, index: int) -> None:
        """A learner is back; reset its optimizer."""
        self._gone.remove(index)
        if self._stack is not None:
            self._stack.begin(index)
        else:
            self._optimizers[index] = self._task.optimizer(self.models[index])


Watch = Callable[[float, nn.Module], None]
"""Called at intervals with the progress and the current model."""


def classic_diloco(settings: Settings, task: Task, learners: int, watch: Watch) -> nn.Module:
    """DiLoCo as published (arXiv 2311.08105): each learner takes H inner steps, then Nesterov steps on the mean of the
    differences. In float32, without overlap. Uses `settings.outer.lr`, `settings.outer.momentum` ("auto": 0.9, as
    published) and `settings.sync.sync_every`. Rounds the token budget up to whole rounds.
    """
    momentum = 0.9 if settings.outer.momentum == "auto" else settings.outer.momentum
    theta = task.model()
    models = [task.model() for _ in range(learners)]
    optimizers = [task.optimizer(model) for model in models]
    streams = [task.stream(m, learners) for m in range(learners)]
    outer = torch.optim.SGD(theta.parameters(), lr=settings.outer.lr, momentum=momentum, nesterov=momentum > 0)
    every = settings.sync.first_every
    rounds = -(-settings.run.tokens // (learners * task.tokens_per_batch * every))
    for r in range(rounds):
        for model, optimizer, stream in zip(models, optimizers, streams, strict=True):
            model.load_state_dict(theta.state_dict())
            for step in range(r * every, (r + 1) * every):
                _step(settings, task, model, optimizer, [stream], step, rounds * every)
        with torch.no_grad():
            for name, p in theta.named_parameters():
                p.grad = p - torch.stack([model.get_parameter(name) for model in models]).mean(0)
        outer.step()
        watch((r + 1) / rounds, theta)
    return theta


def data_parallel(settings: Settings, task: Task, learners: int, watch: Watch, batches: int = 1) -> nn.Module:
    """One model; every step uses `batches` batches of each learner. With `learners` = 1 this is a single process."""
    model = task.model()
    optimizer = task.optimizer(model)
    streams = [stream for m in range(learners) for stream in [task.stream(m, learners)] * batches]
    steps = -(-settings.run.tokens // (learners * batches * task.tokens_per_batch))
    for step in range(steps):
        _step(settings, task, model, optimizer, streams, step, steps)
        watch((step + 1) / steps, model)
    return model


def _step(
    settings: Settings, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, streams: Sequence[Stream],
    step: int, steps: int,
) -> None:  # fmt: skip
    inputs, targets = (torch.cat(parts) for parts in zip(*(s.next_batch() for s in streams), strict=True))
    share = share_at(fraction=step / steps, inner_step=step, budget=1, train=settings.train)
    inner_step(task, model, optimizer, inputs, targets, share, CLIP)
