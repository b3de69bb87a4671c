"""A callback that makes a Lightning `Trainer` a learner. Needs `pip install lightning`.

    from diloco_worker.lightning import DilocoCallback

    trainer = Trainer(max_epochs=-1, callbacks=[DilocoCallback("ps-0:50051,ps-1:50051", save_to="global.ckpt")])
    trainer.fit(module, data)          # until the budget of the run is merged, or max_steps; the model is then global

The callback joins once the Trainer has loaded its checkpoint. It gives this learner its own order of the data, reports
the tokens of each optimizer step, makes the learning rate follow the run, stops at the budget, and loads and saves the
global model. The learner's state is in the Trainer's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco_common.errors import ConfigError, WrongCall
from diloco_worker.joining import join
from diloco_worker.learner import Learner
from diloco_worker.progress_lr import SHAPES, Followed, ProgressLR, Shape, followed
from diloco_worker.shell.arguments import Counted, check_callback, check_word, counted

try:
    from lightning.pytorch import Callback
except ImportError:  # pragma: no cover
    raise ImportError("diloco_worker.lightning needs Lightning: pip install lightning") from None


AVERAGING = "WeightAveraging"
"""Name of the base class of Lightning's EMA and SWA callbacks; a name because older releases do not have it."""


def counted_in(batch: Any) -> Counted:
    """Count by the first tensor in a batch: the elements of an integer tensor are tokens, the rows of others samples.
    Raises ConfigError."""
    first = next(_tensors_in(batch), None)
    if first is None:
        raise ConfigError(
            f"no tensor is in a batch ({type(batch).__name__}): give tokens= or samples=, which counts those of a batch"
        )
    return Counted(len(first), True) if first.is_floating_point() else Counted(first.numel(), False)


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    """Tensors of one dimension or more, in order."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors_in(list(batch.values()))
    elif isinstance(batch, list | tuple):
        for entry in batch:
            yield from _tensors_in(entry)


class DilocoCallback(Callback):  # type: ignore[misc]
    """Joins a run when training begins, and finishes when it ends.

    A LambdaLR of the module that counts steps up to `max_steps` follows the run; any other schedule gets a warning.
    With shuffle=True, `learner.seed` orders the data. `ckpt_path` continues the same learner, with a new order of the
    data. The Trainer's own checkpoints hold local values.
    """

    def __init__(
        self, shards: str, *, save_to: str | Path | None = None, rate: Shape = "cosine", warmup: float = 0.02,
        tokens: Callable[[Any], int] | None = None, samples: Callable[[Any], int] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """
        Args:
            save_to: file for the global model, as `LightningModule.load_from_checkpoint` reads it; None: no file.
            rate: shape of the rate over the run, as in `ProgressLR`, if the module has no schedule of its own.
            warmup: share of the run in which the rate rises.
            tokens, samples: functions that count the tokens or the samples of a batch. Neither: `counted_in`.
            options: options of `join` for one process (run, learner_id, tls, token, ...).

        Raises ConfigError and WrongCall.
        """
        own = "give each device a Trainer of its own (devices=1), each a learner"
        check_callback(shards, options, join, own)
        check_word("rate", rate, SHAPES)
        self.learner: Learner | None = None
        self._shards, self._options = shards, options
        self._save_to = None if save_to is None else Path(save_to)
        self._rate: Shape = rate
        self._warmup = warmup
        self._tokens_of, self._samples_of = tokens, samples
        self._amount = 0
        """Tokens or samples of the batches since the last step of the optimizer."""
        self._steps = 0
        self._saved: dict[str, Any] = {}
        self._schedules: list[ProgressLR] = []
        self._followed: list[Followed] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Join. Raises what `join` raises."""
        others = [callback for callback in trainer.callbacks if callback is not self]
        # Run first: at the end, others put their own values into the module, and these would count as training.
        trainer.callbacks = [self, *others]
        averaging = next((one for one in others if any(k.__name__ == AVERAGING for k in type(one).__mro__)), None)
        state = self._saved.get("learner") if self.learner is None else self.learner.state_dict()
        self.learner = join(self._shards, module, state=state, **self._options)
        if averaging is not None:
            self.learner.telemetry.log.warning(
                "this callback puts an average of this learner alone into the module at the end: save_to has the "
                "global model; the run can keep an average of all (outer.average)", callback=type(averaging).__name__,
            )  # fmt: skip
        # The seed decides the order of the data. Set it before training starts: a loader's workers draw at once.
        torch.manual_seed(self.learner.seed + self.learner.inner_step)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Make each optimizer's rate follow the run. By now its state is loaded."""
        assert self.learner is not None
        learner = self.learner
        self._steps, self._amount = trainer.global_step, 0
        for optimizer in trainer.optimizers:
            learner.compared.has(optimizer)
        if configs := trainer.lr_scheduler_configs:
            total = trainer.estimated_stepping_batches
            steps = [total if (own.interval, own.frequency) == ("step", 1) else inf for own in configs]
            made = [followed(own.scheduler, learner, of) for own, of in zip(configs, steps, strict=True)]
            self._followed = [one for one in made if one is not None]
            return
        self._schedules = [ProgressLR(o, learner, self._rate, warmup=self._warmup) for o in trainer.optimizers]
        for schedule, saved in zip(self._schedules, self._saved.get("schedules", ()), strict=False):
            schedule.load_state_dict(saved)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Set the rate of the module's own schedules to the progress of the run."""
        for schedule in self._followed:
            schedule.set(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report a step, if the optimizer has stepped. Raises what `Learner.step` raises."""
        learner = self._joined()
        amount, is_samples = self._counted(batch)
        self._amount += amount
        if trainer.global_step == self._steps:  # still accumulating gradients
            return
        amount, self._amount, self._steps = self._amount, 0, trainer.global_step
        for schedule in self._schedules:
            schedule.step()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        loss = None if loss is None else loss * trainer.accumulate_grad_batches
        learner.step(loss=loss, **{"samples" if is_samples else "tokens": amount})
        trainer.should_stop = trainer.should_stop or learner.done

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Load the global model into the module, and save it."""
        learner = self._joined()
        if not learner.done:
            learner.telemetry.log.warning(
                "the Trainer ends before the run: the others continue", steps=trainer.global_step,
                tokens_merged=learner.tokens_merged, tokens_budget=learner.tokens_budget,
            )  # fmt: skip
        is_global = learner.finish().is_global
        if self._save_to is not None:
            trainer.save_checkpoint(self._save_to, weights_only=True)
            what = "global model" if is_global else "model of this learner"
            learner.telemetry.log.event(f"{what} saved", file=self._save_to)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if self.learner is not None:
            self.learner.close()

    def state_dict(self) -> dict[str, Any]:
        if self.learner is None:
            return self._saved
        return {"learner": self.learner.state_dict(), "schedules": [s.state_dict() for s in self._schedules]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by the Trainer before training begins."""
        self._saved, self.learner = state_dict, None

    def _joined(self) -> Learner:
        if self.learner is None:
            raise WrongCall("this DilocoCallback has joined no run: give it to the Trainer before fit()")
        return self.learner

    def _counted(self, batch: Any) -> Counted:
        if self._tokens_of is None and self._samples_of is None:
            return counted_in(batch)
        return counted(*(None if of is None else of(batch) for of in (self._tokens_of, self._samples_of)))
