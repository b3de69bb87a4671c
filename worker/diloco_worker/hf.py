"""A callback that makes a Hugging Face `Trainer` a learner. Needs `pip install 'decoupled-diloco[hf]'`.

    from diloco_worker.hf import DilocoCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[DilocoCallback("ps-0:50051,ps-1:50051")])
    trainer.train()          # until the budget of the run is merged, or max_steps; then the model is the global one

The callback joins once the Trainer has loaded its checkpoint. It gives this learner its own order of the data, reports
the tokens of each optimizer step, makes the learning rate follow the run, stops at the budget, and loads and saves the
global model.
"""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any

from torch import nn

from diloco_common.errors import ConfigError, WrongCall
from diloco_worker.joining import join
from diloco_worker.learner import Learner
from diloco_worker.progress_lr import Followed, followed
from diloco_worker.shell.arguments import check_callback

try:
    from transformers import TrainerCallback
except ImportError:  # pragma: no cover
    raise ImportError("diloco_worker.hf needs transformers: pip install 'decoupled-diloco[hf]'") from None

STATE = "diloco.json"
"""File name of the learner's state in each checkpoint of the Trainer."""


class DilocoCallback(TrainerCallback):  # type: ignore[misc]
    """Joins a run when training begins, and finishes when it ends.

    The schedules cosine, linear, constant, constant_with_warmup and warmup_stable_decay follow the run; others follow
    the Trainer's steps. `learner.seed` shuffles the data; shard or shuffle a stream (IterableDataset) yourself.
    `resume_from_checkpoint` inside `output_dir` continues the same learner at its place in the data; from elsewhere it
    starts a new one. The Trainer's checkpoints hold local values.
    """

    def __init__(self, shards: str, *, save_to: str | Path | None = None, **options: Any) -> None:
        """`save_to`: folder for the global model; None: `global` in the Trainer's `output_dir`. `options`: options of
        `join` for one process (run, learner_id, tls, token, ...). Raises ConfigError and WrongCall."""
        check_callback(
            shards, options, join,
            "the Trainer has summed the tokens of all ranks already, and `step` would sum them again, and all ranks "
            "would write the same files. Give each device a Trainer of its own (CUDA_VISIBLE_DEVICES), each a learner",
        )  # fmt: skip
        if save_to is not None and Path(save_to).exists() and not Path(save_to).is_dir():
            raise ConfigError(f"save_to={str(save_to)!r} is a file; give a folder, in which the global model is saved")
        self.learner: Learner | None = None
        self._shards = shards
        self._save_to = None if save_to is None else Path(save_to)
        self._options = options
        self._loss: float | None = None
        self._tokens_seen = 0
        self._schedule: Followed | None = None
        """The Trainer's schedule, if it can follow the run."""

    # ------------------------------------------------------------ called by the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join. Raises what `join` raises."""
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end=True would replace the global model with an earlier one of this learner; "
                "leave it out, and evaluate the model in `save_to`"
            )
        model: nn.Module = kwargs["model"]
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
        earlier: dict[str, Any] | None = None
        if self.learner is not None:
            earlier = self.learner.state_dict()
        elif path.exists():  # an earlier process left it in the checkpoint that the Trainer resumes from
            earlier = json.loads(path.read_text())
        self.learner = learner = join(self._shards, model, state=earlier, **self._options)
        atexit.register(learner.close)
        log = learner.telemetry.log
        if state.global_step > 0 and earlier is None:
            log.warning(
                "this Trainer resumes from a checkpoint without a learner's state: it joins as a new learner, with "
                "another order of its data; put the checkpoint into output_dir to continue as the same learner",
                missing=path, steps=state.global_step,
            )  # fmt: skip
        if not _order_data(kwargs.get("train_dataloader"), learner.seed):
            log.warning("this data has its own order: give each learner a different one, by callback.learner.seed")
        if getattr(model, "main_input_name", "") == "input_ids" and args.include_num_input_tokens_seen in ("no", False):
            args.include_num_input_tokens_seen = "all"
        self._tokens_seen = state.num_input_tokens_seen
        learner.compared.has(kwargs["optimizer"])
        schedule = kwargs["lr_scheduler"]
        self._schedule = followed(getattr(schedule, "scheduler", schedule), learner, state.max_steps)
        budget = learner.tokens_budget
        log.event(
            "training ends" if budget else "training ends: the run has no budget, so max_steps alone decides",
            after=f"{budget} tokens of all learners, or {state.max_steps} steps of this one, whichever comes first",
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._schedule is not None:
            self._schedule.set(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        learner = self._joined()
        tokens = state.num_input_tokens_seen - self._tokens_seen
        self._tokens_seen = state.num_input_tokens_seen
        if self._tokens_seen:
            learner.step(tokens=tokens, loss=self._loss)
        else:  # images, for example
            learner.step(samples=args.train_batch_size * args.gradient_accumulation_steps, loss=self._loss)
        if learner.done:
            if not control.should_training_stop:
                learner.telemetry.log.event("budget reached", steps=state.global_step, of=state.max_steps)
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Keep the loss, which the Trainer reports only when it logs."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.learner is not None and folder.is_dir():
            (folder / STATE).write_text(json.dumps(self.learner.state_dict()))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the global model into the module, and save it with its tokenizer."""
        learner = self._joined()
        if not learner.done:
            learner.telemetry.log.warning(
                "max_steps reached before the end of the run: the others continue", steps=state.global_step,
                tokens_merged=learner.tokens_merged, tokens_budget=learner.tokens_budget,
            )  # fmt: skip
        is_global = learner.finish().is_global
        atexit.unregister(learner.close)
        folder = self._save_to or Path(args.output_dir) / "global"
        parts: tuple[Any, ...] = kwargs["model"], kwargs.get("processing_class")
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        learner.telemetry.log.event(f"{'global model' if is_global else 'model of this learner'} saved", folder=folder)

    # ------------------------------------------------------------ helpers

    def _joined(self) -> Learner:
        if self.learner is None:
            raise WrongCall("this DilocoCallback has joined no run: give it to the Trainer before train()")
        return self.learner


def _order_data(loader: Any, seed: int) -> bool:
    """Shuffle by this seed, differently in every epoch. Returns whether the seed could be set.

    Trainer and accelerate seed the order with `data_seed` or `seed`, which are equal in all learners. The order
    depends on seed and epoch alone, so a resumed Trainer finds its place again.
    """
    batches = getattr(loader, "batch_sampler", None)
    for owner in (batches, getattr(batches, "batch_sampler", None), loader):
        sampler: Any = getattr(owner, "sampler", None)
        if hasattr(sampler, "initial_seed"):  # a sampler of accelerate
            sampler.initial_seed = seed
            return True
        generator = getattr(sampler, "generator", None)
        if generator is not None:
            generator.manual_seed(seed)
            return True
    return False
