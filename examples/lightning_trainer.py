"""Lightning's Trainer as a learner: one callback. Needs pip install lightning.

diloco-server --listen 127.0.0.1:50051 --set run.id=spirals --set run.tokens=100_000
python examples/lightning_trainer.py 127.0.0.1:50051 runs/lightning.ckpt  # as many as you like, each with its own file
"""

import sys

import torch
from lightning import LightningModule, Trainer
from own_loop import spirals
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diloco_worker.lightning import DilocoCallback


class Spirals(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        points, label = batch
        return nn.functional.cross_entropy(self.net(points), label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(shards: str, file: str) -> None:
    data = DataLoader(TensorDataset(*spirals(16384, torch.Generator().manual_seed(1))), batch_size=256, shuffle=True)
    callback = DilocoCallback(shards, run="spirals", save_to=file)

    Trainer(
        max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[callback],
    ).fit(Spirals(), data)  # fmt: skip

    model = Spirals.load_from_checkpoint(file).cpu()  # the global model, as the callback has saved it
    points, label = spirals(4096, torch.Generator().manual_seed(0))
    accuracy = (model.net(points).argmax(1) == label).float().mean()
    learner = callback.learner
    print(f"{learner.learner_id}: {100 * accuracy:.1f} % of held-out points on the right spiral")


if __name__ == "__main__":
    shards, file = [*sys.argv[1:], *["127.0.0.1:50051", "runs/lightning.ckpt"][len(sys.argv) - 1 :]]
    main(shards, file)
