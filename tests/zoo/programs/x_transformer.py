"""x-transformers: rotary positions, gated feed-forward and its autoregressive wrapper, on bytes."""

import argparse
import json
import os
from pathlib import Path

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

import diloco_worker  # diloco

TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)
TRAIN, HELD_OUT = TEXT[:-8192], TEXT[-8192:]


def make_model():
    layers = Decoder(dim=64, depth=2, heads=4, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=128, max_seq_len=32, attn_layers=layers))


@torch.no_grad()
def evaluate(model):
    return model.eval()(HELD_OUT.view(-1, 32)).item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 400, "batch": 16, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    learner = diloco_worker.join(os.environ["SHARDS"], model, learner_id=os.environ["LEARNER"])  # diloco
    torch.manual_seed(learner.seed)  # diloco
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(args.steps):
        starts = torch.randint(len(TRAIN) - 32, (args.batch, 1))
        loss = model.train()(TRAIN[starts + torch.arange(32)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        learner.step(tokens=args.batch * 32, loss=loss)  # diloco
        if learner.done:  # diloco
            break  # diloco
    learner.finish()  # diloco
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
