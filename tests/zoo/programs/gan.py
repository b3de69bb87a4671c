"""A GAN with two optimizers, on eight clusters in the plane."""

import argparse
import json
import math
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco

LATENT = 8


def real(count, generator=None):
    angle = torch.randint(8, (count,), generator=generator) * (math.pi / 4)
    center = torch.stack([angle.cos(), angle.sin()], 1)
    return center + 0.08 * torch.randn(count, 2, generator=generator)


def make_model():
    def mlp(inputs, outputs):
        return nn.Sequential(
            nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
        )

    return {"generator": mlp(LATENT, 2), "discriminator": mlp(2, 1)}


@torch.no_grad()
def evaluate(models):
    """Sliced Wasserstein distance between what is generated and what is real."""
    generator = torch.Generator().manual_seed(1)
    fake = models["generator"](torch.randn(4000, LATENT, generator=generator))
    ways = F.normalize(torch.randn(2, 64, generator=generator), dim=0)
    return ((fake @ ways).sort(0)[0] - (real(4000, generator) @ ways).sort(0)[0]).abs().mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 1200, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    models = make_model()
    generator, discriminator = models["generator"], models["discriminator"]
    learner = diloco_worker.join(os.environ["SHARDS"], models, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for step in range(args.steps):
        fake = generator(torch.randn(args.batch, LATENT))
        loss_d = F.softplus(-discriminator(real(args.batch))).mean() + F.softplus(discriminator(fake.detach())).mean()
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()

        loss_g = F.softplus(-discriminator(fake)).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        learner.step(samples=args.batch, loss=loss_d)  # diloco
        if learner.done:  # diloco
            break  # diloco
        if step % 200 == 0:
            print(f"step {step}: D {loss_d.item():.3f}, G {loss_g.item():.3f}")
    learner.finish()  # diloco
    print(json.dumps({"distance": evaluate(models)}))


if __name__ == "__main__":
    main()
