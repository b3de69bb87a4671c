"""PPO on a pole on a cart: many at once, in an environment written by hand. Episodes end after 200 steps."""

import argparse
import json
import os

import torch
from torch import nn
from torch.distributions import Categorical

import diloco_worker  # diloco


class CartPole:
    def __init__(self, count, generator=None):
        self.generator, self.age, self.state = generator, torch.zeros(count), torch.zeros(count, 4)

    def step(self, action):
        _, v, angle, spin = self.state.T
        push = (20.0 * action - 10.0 + 0.05 * spin**2 * angle.sin()) / 1.1
        twist = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        self.state = self.state + 0.02 * torch.stack([v, push - 0.05 * twist * angle.cos() / 1.1, spin, twist], 1)
        over = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21) | (self.age >= 199)
        fresh = torch.rand(self.state.shape, generator=self.generator) * 0.1 - 0.05
        self.state, self.age = torch.where(over[:, None], fresh, self.state), (self.age + 1) * ~over
        return over


def make_model():
    mlps = [nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs)) for outputs in (2, 1)]
    return {"actor": mlps[0], "critic": mlps[1]}


@torch.no_grad()
def evaluate(models):
    env, alive = CartPole(500, torch.Generator().manual_seed(1)), [torch.ones(500)]
    env.state = 0.2 * torch.rand(500, 4, generator=env.generator) - 0.1
    for _ in range(199):
        alive.append(alive[-1] * ~env.step(models["actor"](env.state).argmax(1)))
    return sum(alive).mean().item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 600, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    actor, critic = (models := make_model()).values()
    learner = diloco_worker.join(os.environ["SHARDS"], models, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
    env, s, a, over = CartPole(args.batch // 4), [None] * 32, [None] * 32, [None] * 32
    for step in range(args.steps):
        if step % 24 == 0:
            with torch.no_grad():
                for t in range(32):
                    s[t], a[t] = env.state, Categorical(logits=actor(env.state)).sample()
                    over[t] = env.step(a[t]).float()
                value, gain = critic(torch.stack([*s, env.state]))[..., 0], [torch.zeros(())] * 33
                for t in reversed(range(32)):
                    gain[t] = 1 + 0.99 * (1 - over[t]) * (value[t + 1] + 0.95 * gain[t + 1]) - value[t]
                seen, done, edge = torch.cat(s), torch.cat(a), torch.cat(gain[:32])
                old, target = Categorical(logits=actor(seen)).log_prob(done), edge + value[:32].flatten()
        rows = torch.randperm(len(seen))[: args.batch]
        ratio = (Categorical(logits=actor(seen[rows])).log_prob(done[rows]) - old[rows]).exp()
        gains = torch.min(ratio * edge[rows], ratio.clamp(0.8, 1.2) * edge[rows]) / edge.std()
        loss = (1e-3 * (critic(seen[rows])[:, 0] - target[rows]).square() - gains).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(samples=len(rows), loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"return": evaluate(models)}))


if __name__ == "__main__":
    main()
