"""A variational autoencoder of small binary pictures."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco


def pictures(count, generator=None):
    """A bar and a disc, 12 by 12, somewhere."""
    at = torch.arange(12.0)
    x, y, r, bar = (12 * torch.rand(4, count, 1, 1, generator=generator)).unbind()
    disc = (at - x) ** 2 + (at[:, None] - y) ** 2 < (1 + r / 4) ** 2
    return (disc | ((at - bar).abs() < 1).expand(count, 12, 12)).float().flatten(1)


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 144))

    def forward(self, x, generator=None):
        mean, log_var = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn(mean.shape, generator=generator) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def make_model():
    return VAE()


def negative_elbo(model, x, generator=None):
    logits, mean, log_var = model(x, generator)
    divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
    return F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x) + divergence


@torch.no_grad()
def evaluate(model):
    generator = torch.Generator().manual_seed(1)
    return negative_elbo(model, pictures(5000, generator), generator).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 1000, "batch": 32, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(args.steps):
        loss = negative_elbo(model, pictures(args.batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=args.batch, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
        if step % 500 == 0:
            print(f"step {step}: {loss.item():.1f} nats")
    learner.finish()  # diloco
    print(json.dumps({"nats": evaluate(model)}))


if __name__ == "__main__":
    main()
