"""A Trainer of Hugging Face with our callback, as a learner of a real shard."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import settings_with
from torch.optim.lr_scheduler import LambdaLR, StepLR

from diloco_worker.global_model import pull_global_model

transformers = pytest.importorskip(
    "transformers", reason="NOT RUN: transformers is not installed (pip install 'decoupled-diloco[hf]')"
)
pytest.importorskip("accelerate", reason="NOT RUN: accelerate is not installed")
from diloco_worker.hf import DilocoCallback  # noqa: E402

EXACT = {"push": "float32", "pull": "float32", "quorum": 1, "fragments": 2, "sync_every": 2}
TOKENS_PER_STEP = 4 * 8


class Drawn(torch.utils.data.Dataset):
    """Windows of tokens; remembers which were drawn."""

    def __init__(self) -> None:
        self.drawn: list[int] = []
        self._windows = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.drawn.append(i)
        return {"input_ids": self._windows[i], "labels": self._windows[i]}


def gpt() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=1, n_embd=16, n_positions=8, vocab_size=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def trainer(address: str, folder: Path, *, learner_id: str = "a", data: Any = None, **arguments: Any) -> Any:
    given = {
        "per_device_train_batch_size": 4, "logging_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "learning_rate": 1e-2, "max_steps": 10_000,
    }  # fmt: skip
    callback = DilocoCallback(address, learner_id=learner_id, wait_s=20.0)
    made = transformers.Trainer(
        gpt(), transformers.TrainingArguments(str(folder), **given | arguments),
        train_dataset=data if data is not None else Drawn(), eval_dataset=Drawn(), callbacks=[callback],
    )  # fmt: skip
    made.diloco = callback
    return made


def test_it_stops_at_the_budget_and_saves_the_global_model(serve, tmp_path, written):
    shard = serve(settings_with(run={"tokens": 20 * TOKENS_PER_STEP}, sync=EXACT | {"merge": "auto"}))
    training = trainer(shard.address, tmp_path)
    training.train()
    assert shard.core.versions.merge == "agreement", "the Trainer's own optimizer is AdamW"

    learner = training.diloco.learner
    assert learner.state == "done"
    assert learner.tokens == learner.inner_step * TOKENS_PER_STEP
    assert 20 <= learner.inner_step < 200
    found = pull_global_model([shard.address])
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "global")
    for model in (training.model, loaded):
        mine = dict(model.named_parameters(remove_duplicate=False))
        assert all(torch.equal(mine[name], values) for name, values in found.tensors.items())
    assert 'training ends after="640 tokens of all learners, or 10000 steps of this one' in written.getvalue()
    assert f"budget reached steps={learner.inner_step} of=10000" in written.getvalue()


def test_max_steps_ends_it_before_the_run_and_says_so(serve, tmp_path, written):
    shard = serve(settings_with(run={"tokens": 10**6}, sync=EXACT))
    training = trainer(shard.address, tmp_path, max_steps=6)
    training.train()
    assert training.diloco.learner.inner_step == 6
    assert "max_steps reached before the end of the run: the others continue steps=6" in written.getvalue()
    assert (tmp_path / "global" / "model.safetensors").exists()


def test_a_trainer_that_resumes_goes_on_as_the_same_learner_where_it_was_in_the_data(serve, tmp_path):
    shard = serve(settings_with(run={"tokens": 10**6}, sync=EXACT))
    whole, first, second = Drawn(), Drawn(), Drawn()
    saving = {"save_strategy": "steps", "save_steps": 5}
    trainer(shard.address, tmp_path / "whole", data=whole, max_steps=10).train()
    trainer(shard.address, tmp_path / "parts", data=first, max_steps=5, **saving).train()
    state = json.loads((tmp_path / "parts/checkpoint-5/diloco.json").read_text())
    assert (state["learner_id"], state["inner_step"], state["tokens"]) == ("a", 5, 5 * TOKENS_PER_STEP)

    again = trainer(shard.address, tmp_path / "parts", learner_id="", data=second, max_steps=10, **saving)
    again.train(resume_from_checkpoint=True)

    learner = again.diloco.learner
    assert (learner.learner_id, learner.inner_step) == ("a", 10)
    assert whole.drawn[:40] == first.drawn[:20] + second.drawn[:20]


def by_lambda(optimizer: torch.optim.Optimizer) -> Any:
    return LambdaLR(optimizer, lambda step: 0.5)


def own_kind(optimizer: torch.optim.Optimizer) -> Any:
    return StepLR(optimizer, 1_000_000)


@pytest.mark.parametrize(
    ("make", "more", "rates_are", "said"),
    [
        (by_lambda, {}, lambda rate: rate == pytest.approx(0.5e-2), "the rate follows the run schedule=LambdaLR"),
        (own_kind, {}, lambda rate: rate == pytest.approx(1e-2), "the rate follows the steps of this Trainer"),
        (
            None,
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.9e-2, "power": 2.0}},
            lambda rate: 0.9e-2 <= rate <= 1e-2, "the rate follows the run schedule=LambdaLR",
        ),
    ],
    ids=["lambda", "of another kind", "with arguments"],
)  # fmt: skip
def test_a_schedule_of_the_users_own_is_kept(serve, tmp_path, written, make, more, rates_are, said):
    shard = serve(settings_with(run={"tokens": 3200}, sync={"quorum": 1}))
    training = trainer(shard.address, tmp_path, **{"lr_scheduler_type": "linear", "max_steps": 400} | more)
    if make is not None:
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-2)
        training.lr_scheduler = make(training.optimizer)
    training.train()
    rates = [line["learning_rate"] for line in training.state.log_history if "learning_rate" in line]
    assert rates
    assert all(map(rates_are, rates))
    assert said in written.getvalue()


def test_the_rate_follows_the_run_and_not_the_steps_of_the_trainer(serve, tmp_path):
    shard = serve(settings_with(run={"tokens": 60 * TOKENS_PER_STEP}, sync=EXACT))
    training = trainer(shard.address, tmp_path, lr_scheduler_type="linear", max_steps=100_000)
    training.train()
    rates = [line["learning_rate"] for line in training.state.log_history if "learning_rate" in line]
    assert rates[0] == pytest.approx(1e-2)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.98e-2, "by the steps of the Trainer it would still be 0.998e-2"


def test_sigterm_hands_over_what_was_trained(serve, tmp_path, capsys):
    shard = serve(settings_with(sync=EXACT | {"sync_every": 500}))
    training = trainer(shard.address, tmp_path)

    class Told(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 10:
                signal.raise_signal(signal.SIGTERM)

    training.add_callback(Told())
    with pytest.raises(SystemExit) as ended:
        training.train()
    assert ended.value.code == 143
    assert "a has left the run after 11 steps; all of it is merged" in capsys.readouterr().err
    assert shard.version() == 1
