"""Diffusion in the plane, with an EMA of the network that draws the samples."""

import argparse
import json
import os

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import diloco_worker  # diloco

TIMES = 50
ALPHA_BAR = torch.cumprod(1 - torch.linspace(1e-3, 0.2, TIMES), 0)


def spiral(count, generator=None):
    r = torch.rand(count, 1, generator=generator).sqrt()
    return 2 * r * torch.cat([(9 * r).cos(), (9 * r).sin()], 1) + 0.03 * torch.randn(count, 2, generator=generator)


class Denoiser(nn.Sequential):
    def forward(self, x, t):
        return super().forward(torch.cat([x, torch.sin(t[:, None] * 2.0 ** -torch.arange(6.0))], 1))


def make_model():
    return Denoiser(nn.Linear(8, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))


def denoising_loss(model, x, generator=None):
    t = torch.randint(TIMES, (len(x),), generator=generator)
    noise, kept = torch.randn(x.shape, generator=generator), ALPHA_BAR[t][:, None]
    return (model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t) - noise).square().mean()


@torch.no_grad()
def evaluate(model):
    generator = torch.Generator().manual_seed(1)
    return denoising_loss(model, spiral(20_000, generator), generator).item()


@torch.no_grad()
def sample(model, count):
    x = torch.randn(count, 2)
    for t in reversed(range(TIMES)):
        before, noise = ALPHA_BAR[t - 1] if t else torch.tensor(1.0), model(x, torch.full((count,), t))
        x = (x - (1 - ALPHA_BAR[t]).sqrt() * noise) / ALPHA_BAR[t].sqrt() * before.sqrt() + (1 - before).sqrt() * noise
    return x


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 1000, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(args.steps):
        loss = denoising_loss(model, spiral(args.batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}, spread of samples {sample(ema, 256).std().item():.3f}")
    learner.finish()  # diloco
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
