"""A Trainer of Lightning with our callback, as a learner of a real shard."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import settings_with

from diloco_server.core.ledger import MergeChosen
from diloco_worker.global_model import pull_global_model
from diloco_worker.progress_lr import WARMUP_FLOOR, WARMUP_STEPS

lightning = pytest.importorskip("lightning", reason="NOT RUN: lightning is not installed (pip install lightning)")
from diloco_worker.lightning import DilocoCallback, counted_in  # noqa: E402

EXACT = {"push": "float32", "pull": "float32", "quorum": 1, "fragments": 2, "sync_every": 2}
BATCH = 4


ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


class Sine(lightning.LightningModule):
    """Of the first two columns, by a small model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.rates: list[float] = []
        self.drawn: list[float] = []
        """The first value of each row."""

    def training_step(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        self.drawn += rows[:, 0].tolist()
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return (self.net(rows) - rows[:, :2].sin()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(
    address: str, folder: Path, *, loaders: int = 0, resume: Path | None = None, save: Path | None = None,
    callback: dict[str, Any] | None = None, others: tuple[Any, ...] = (), first: tuple[Any, ...] = (),
    module: Sine | None = None, **arguments: Any,
) -> tuple[DilocoCallback, Sine]:  # fmt: skip
    given = {
        "max_epochs": -1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
    }  # fmt: skip
    diloco = DilocoCallback(address, **{"wait_s": 20.0, **(callback or {"learner_id": "a"})})

    class Saves(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if save is not None and trainer.global_step == trainer.max_steps:
                trainer.save_checkpoint(save)

    module = module or Sine()
    trainer = lightning.Trainer(callbacks=[*first, diloco, Saves(), *others], **given | arguments)
    data = torch.utils.data.DataLoader(ROWS, batch_size=BATCH, shuffle=True, num_workers=loaders)
    trainer.fit(module, data, ckpt_path=resume)
    return diloco, module


def test_it_stops_at_the_budget_and_saves_the_global_model(serve, tmp_path, written):
    shard = serve(settings_with(run={"tokens": 20 * BATCH}, sync=EXACT | {"merge": "auto"}))
    diloco, module = fit(shard.address, tmp_path, callback={"save_to": tmp_path / "global.ckpt"})
    chosen = [event.fact for event in shard.core.ledger.events if isinstance(event.fact, MergeChosen)]
    assert [(one.merge, one.why.partition(" ")[2]) for one in chosen] == [
        ("mean", "trains with another optimizer than Adam")
    ]

    assert diloco.learner.state == "done"
    assert diloco.learner.tokens == diloco.learner.inner_step * BATCH
    found = pull_global_model([shard.address])
    loaded = Sine.load_from_checkpoint(tmp_path / "global.ckpt")
    for model in (module, loaded):
        mine = dict(model.named_parameters())
        assert all(torch.equal(mine[name], values) for name, values in found.tensors.items())
    assert module.rates[0] < max(module.rates)
    assert "global model saved" in written.getvalue()


def test_batches_of_one_optimizer_step_are_one_step_of_the_learner(serve, tmp_path):
    shard = serve(settings_with(run={"tokens": 10**6}, sync=EXACT))
    diloco, _ = fit(shard.address, tmp_path, max_steps=4, accumulate_grad_batches=2)
    assert (diloco.learner.inner_step, diloco.learner.tokens) == (4, 4 * 2 * BATCH)


@pytest.mark.parametrize("loaders", [0, 1])
def test_every_learner_draws_its_data_in_an_order_of_its_own(serve, tmp_path, loaders: int) -> None:
    """Though all processes are seeded alike. Workers of a loader draw before the training begins."""
    shard = serve(settings_with(run={"tokens": 10**6}, sync=EXACT))
    orders = []
    for learner_id in ("a", "b"):
        lightning.seed_everything(42)
        _, module = fit(shard.address, tmp_path, loaders=loaders, callback={"learner_id": learner_id}, max_steps=5)
        orders.append(module.drawn)
    assert orders[0] != orders[1]


def test_a_trainer_that_resumes_goes_on_as_the_same_learner(serve, tmp_path):
    shard = serve(settings_with(run={"tokens": 10**6}, sync=EXACT))
    fit(shard.address, tmp_path, max_steps=5, save=tmp_path / "saved.ckpt")
    diloco, module = fit(
        shard.address, tmp_path, callback={"run": "local"}, max_steps=10, resume=tmp_path / "saved.ckpt"
    )
    assert (diloco.learner.learner_id, diloco.learner.inner_step, diloco.learner.tokens) == ("a", 10, 10 * BATCH)
    assert module.rates[0] >= 0.1 * WARMUP_FLOOR * 5 / WARMUP_STEPS, "it does not rise once more"


@pytest.mark.parametrize(
    ("batch", "amount", "is_samples"),
    [
        ({"input_ids": torch.zeros(2, 8, dtype=torch.int64)}, 16, False),
        ((torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64)), 2, True),
        ([{"x": torch.zeros(3, 5)}], 3, True),
        ({"id": [3], "text": ["one", "two"], "input_ids": torch.zeros(2, 8, dtype=torch.int64)}, 16, False),
    ],
)
def test_ids_are_tokens_and_other_rows_are_samples(batch: Any, amount: int, is_samples: bool) -> None:
    assert counted_in(batch) == (amount, is_samples)


def test_sigterm_hands_over_what_was_trained(serve, tmp_path, capsys):
    """Lightning puts its own handler before that of the learner, and both are called."""
    shard = serve(settings_with(sync=EXACT | {"sync_every": 500}))

    class Told(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 10:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        fit(shard.address, tmp_path, others=(Told(),))
    assert ended.value.code == 143
    assert "a has left the run after 11 steps; all of it is merged" in capsys.readouterr().err
    assert shard.version() == 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning puts the learner's back, which then does as this


class Average(lightning.pytorch.callbacks.EMAWeightAveraging):
    pass


@pytest.mark.parametrize("place", ["first", "others"])
def test_an_average_of_lightning_is_never_taken_for_training(serve, tmp_path, written, place):
    shard = serve(settings_with(sync=EXACT | {"sync_every": 4}))
    callback = {"save_to": tmp_path / "global.ckpt", "learner_id": "a"}
    fit(shard.address, tmp_path, callback=callback, max_steps=10, **{place: (Average(decay=0.99),)})
    found = pull_global_model([shard.address]).tensors
    saved = torch.load(tmp_path / "global.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], values) for name, values in found.items())
    assert "this callback puts an average of this learner alone" in written.getvalue()


class Scheduled(Sine):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        own = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / 1e5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": own, "interval": self.interval}}


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_of_the_modules_own_follows_the_run_where_it_counts_steps(serve, tmp_path, written, interval):
    shard = serve(settings_with(run={"tokens": 40 * BATCH}, sync=EXACT))
    made = Scheduled()
    made.interval = interval
    _, module = fit(
        shard.address, tmp_path, callback={"samples": len, "learner_id": "a"}, max_steps=100_000, module=made
    )
    assert module.rates[0] == 0.025
    assert ("the rate follows the run" in written.getvalue()) is (interval == "step")
    assert ("the rate follows the steps of this Trainer, not the run" in written.getvalue()) is (interval != "step")
