"""The Trainer of Lightning with two loader workers: a network that tells five spirals apart."""

import argparse
import json
import logging
import os
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from diloco_worker.lightning import DilocoCallback  # diloco


def spirals(count, seed):
    generator = torch.Generator().manual_seed(seed)
    y, r = torch.randint(5, (count,), generator=generator), torch.rand(count, generator=generator)
    angle = 4 * r + y * 1.2566 + 0.2 * torch.randn(count, generator=generator)
    return torch.stack([r * angle.cos(), r * angle.sin()], 1), y


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.SiLU())
        self.head = nn.Linear(64, 5)

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.head(self.net(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make_model():
    return Classifier()


@torch.no_grad()
def evaluate(model):
    x, y = spirals(8000, seed=1)
    model.eval()
    return (model.head(model.net(x)).argmax(1) == y).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 600, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = DataLoader(TensorDataset(*spirals(9600, seed=2)), args.batch, shuffle=True, num_workers=2)
    module = make_model()
    trainer = Trainer(
        max_steps=args.steps, max_epochs=-1, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[DilocoCallback(os.environ["SHARDS"], learner_id=os.environ["LEARNER"])],  # diloco
    )  # fmt: skip
    trainer.fit(module, data)
    print(json.dumps({"accuracy": evaluate(module)}))


if __name__ == "__main__":
    main()
