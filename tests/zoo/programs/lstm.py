"""A language model of characters: an LSTM with tied weights, and an update of plain SGD written by hand."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import diloco_worker  # diloco

TEXT = Path(argparse.__file__).read_text()
WORDS = sorted(set(TEXT))
CODES = torch.tensor([WORDS.index(c) for c in TEXT])
TRAIN, HELD_OUT = CODES[:-8192], CODES[-8192:]


class Model(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.encoder = nn.Embedding(len(WORDS), width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, len(WORDS))
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, x, state=None):
        y, state = self.lstm(self.encoder(x), state)
        return self.decoder(y), state


def make_model():
    return Model()


@torch.no_grad()
def evaluate(model):
    x = HELD_OUT.view(64, 128)
    return F.cross_entropy(model(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten()).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 700, "batch": 16, "seed": 0, "part": -1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=4.0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.part = diloco_worker.take_number(os.environ["SHARDS"], learner_id=os.environ["LEARNER"])  # diloco
    text = TRAIN if args.part < 0 else TRAIN.chunk(3)[args.part]
    rows = text[: len(text) // args.batch * args.batch].view(args.batch, -1)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    state, at = None, 0
    for step in range(args.steps):
        if at + 33 > rows.shape[1]:
            state, at = None, 0
        x, y, at = rows[:, at : at + 32], rows[:, at + 1 : at + 33], at + 32
        state = None if state is None else tuple(part.detach() for part in state)
        logits, state = model(x, state)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-args.lr)
        learner.step(tokens=y.numel(), loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    learner.finish()  # diloco
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
