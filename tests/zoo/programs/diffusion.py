"""Diffusers: a small UNet learns to take noise from blurred stripes."""

import argparse
import json
import os

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional as F

import diloco_worker  # diloco


def images(count, generator):
    at = torch.linspace(0, 6.28, 8)
    turn = torch.rand(count, 2, 1, 1, generator=generator) * torch.tensor([6.28, 2.0])[:, None, None]
    return (turn[:, 1:] * (at[:, None] * turn[:, :1].cos() + at * turn[:, :1].sin()) + turn[:, :1]).sin()


def make_model():
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), norm_num_groups=4,
    )  # fmt: skip


def loss_of(model, count, generator):
    clean, times = images(count, generator), torch.randint(100, (count,), generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    noisy = DDPMScheduler(num_train_timesteps=100).add_noise(clean, noise, times)
    return F.mse_loss(model(noisy, times).sample, noise)


@torch.no_grad()
def evaluate(model):
    return loss_of(model.eval(), 2000, torch.Generator().manual_seed(1)).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 300, "batch": 16, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, generator = make_model(), torch.Generator().manual_seed(2)
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    generator.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(args.steps):
        loss = loss_of(model.train(), args.batch, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"mse": evaluate(model)}))


if __name__ == "__main__":
    main()
