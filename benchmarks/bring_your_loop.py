"""Trains nanoGPT with its own `train.py`, in three ways with equal tokens. Numbers of docs/bring-your-loop.md.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/bring_your_loop.py nanoGPT --seeds 1 2 3 4 5

    learners    three processes of train.py with the lines of the page, and two shards
    large       one process, three times the batch, as many steps as a learner
    small       one process, the same batch, three times the steps
    third       one process, the same batch and steps as one learner: a third of the tokens

The text is English prose that comes with Python (`pydoc_data.topics`), in characters. The loss is that of the whole
held-out tenth, in fixed windows, in nats per character.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from diloco_common.allocator import tune_allocator
from foreign_loop import Running, all_ended, begin, changed
from light_learners import running_shards
from topics import characters

BATCH, CONTEXT = 8, 64
LOOP = [
    f"--block_size={CONTEXT}", "--n_head=4", "--dropout=0.0", "--dataset=topics",
    "--device=cpu", "--compile=False", "--dtype=float32", "--gradient_accumulation_steps=1",
    "--learning_rate=1e-3", "--min_lr=1e-4", "--beta2=0.99", "--eval_iters=5", "--log_interval=100",
    "--always_save_checkpoint=True",
]  # fmt: skip
SEED = ("torch.manual_seed(1337 + seed_offset)", "torch.manual_seed(int(os.environ['SEED']) + seed_offset)")
LINES = [
    # after or instead of which line of train.py -> the new ones; docs/bring-your-loop.md shows them
    ("from model import GPTConfig, GPT\n", "from model import GPTConfig, GPT\nimport diloco_worker\n"),
    (
        "    optimizer.load_state_dict(checkpoint['optimizer'])\n",
        "    optimizer.load_state_dict(checkpoint['optimizer'])\n"
        "learner = diloco_worker.join(os.environ['SHARDS'], model, run='nano',"
        " state=checkpoint.get('learner') if init_from == 'resume' else None)\n"
        "torch.manual_seed(learner.seed + learner.inner_step)\n",
    ),
    (
        "lr = get_lr(iter_num) if",
        "lr = get_lr(max(learner.fraction * lr_decay_iters, min(iter_num, warmup_iters))) if",
    ),
    ("'config': config,\n", "'config': config, 'learner': learner.state_dict(),\n"),
    (
        "    optimizer.zero_grad(set_to_none=True)\n",
        "    optimizer.zero_grad(set_to_none=True)\n"
        "    learner.step(tokens=tokens_per_iter, loss=loss * gradient_accumulation_steps)\n",
    ),
    ("if iter_num > max_iters:", "if iter_num > max_iters or learner.done:"),
    (
        "if ddp:\n    destroy_process_group()",
        "learner.finish()\n"
        "checkpoint = {'model': raw_model.state_dict(), 'model_args': model_args, 'iter_num': iter_num}\n"
        "torch.save(checkpoint, os.path.join(out_dir, 'ckpt.pt'))\n",
    ),
]  # fmt: skip
MUON = [
    # of all processes alike; query, key and value are one matrix in nanoGPT
    (
        "optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)\n",
        "from diloco_worker.builtin.muon import MuonWithAdamW\n"
        "hidden = {n: p for n, p in model.named_parameters() if n.startswith('transformer.h.') and p.ndim == 2}\n"
        "rest = [p for n, p in model.named_parameters() if n not in hidden]\n"
        "optimizer = MuonWithAdamW(\n"
        "    [(p, 3 if n.endswith('c_attn.weight') else 1) for n, p in hidden.items()],\n"
        "    [{'params': [p for p in rest if p.ndim >= 2], 'weight_decay': weight_decay},\n"
        "     {'params': [p for p in rest if p.ndim < 2], 'weight_decay': 0.0}],\n"
        "    lr=learning_rate, momentum=0.95, weight_decay=weight_decay, betas=(beta1, beta2))\n",
    ),
    (
        "param_group['lr'] = lr\n",
        "param_group['lr'] = lr * (float(os.environ['MUON']) if 'parts' in param_group else 1)\n",
    ),
]  # fmt: skip
REFERENCES = ["large", "small", "third"]
AVERAGED = [("model, run='nano',", "model, run='nano', companions=optimizer,")]


def prepare(nano: Path, *, muon: bool, averaged: bool) -> None:
    """Data and scripts, in the checkout."""
    folder = nano / "data/topics"
    folder.mkdir(exist_ok=True)
    data = characters().astype(np.uint16)
    held_out = len(data) * 9 // 10
    data[:held_out].tofile(folder / "train.bin")
    data[held_out:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": int(data.max()) + 1}))
    script = changed((nano / "train.py").read_text(), [SEED, *(MUON if muon else [])])
    (nano / "train_seeded.py").write_text(script)
    (nano / "train_learner.py").write_text(changed(changed(script, LINES), AVERAGED if averaged else []))


def train(
    nano: Path, script: str, name: str, seed: int, steps: int, batch: int, model: Sequence[str], shards: str = ""
) -> Running:
    """Begin one process of train.py."""
    out = nano / f"out-{name}"
    ends = (
        ["--max_iters=100000000", "--eval_interval=100000000"]
        if shards
        else [f"--max_iters={steps}", f"--eval_interval={steps}"]
    )
    arguments = [
        *model, *LOOP, *ends, f"--batch_size={batch}", f"--lr_decay_iters={steps}", f"--warmup_iters={steps // 10}",
        f"--out_dir={out.name}",
    ]  # fmt: skip
    return begin([script, *arguments], nano, nano / f"{name}.log", SEED=str(seed), SHARDS=shards)


def with_learners(nano: Path, seed: int, steps: int, model: Sequence[str], more: Sequence[str]) -> None:
    """Three learners and two shards, until the budget is merged. `more`: settings of the shards."""
    settings = ["run.id=nano", f"run.tokens={3 * steps * BATCH * CONTEXT}", "sync.fragments=6", *more]
    with running_shards(2, *settings) as shards:
        addresses = ",".join(shard.address for shard in shards)
        names = [f"learner-{seed}-{i}" for i in range(3)]
        all_ended([train(nano, "train_learner.py", name, seed, steps, BATCH, model, addresses) for name in names])


@torch.no_grad()
def loss(nano: Path, name: str) -> float:
    """Of the whole held-out text."""
    sys.path.insert(0, str(nano))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    saved = torch.load(nano / f"out-{name}" / "ckpt.pt")
    model = GPT(GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    text = torch.from_numpy(np.fromfile(nano / "data/topics/val.bin", dtype=np.uint16).astype(np.int64))
    windows = (len(text) - 1) // CONTEXT
    inputs, targets = (text[i : i + windows * CONTEXT].view(windows, CONTEXT) for i in (0, 1))
    total = sum(float(model(x, y)[1]) * len(x) for x, y in zip(inputs.split(64), targets.split(64), strict=True))
    return total / windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nano", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=1000, help="of each learner")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the shards")
    parser.add_argument("--muon", type=float, metavar="TIMES", help="Muon, at so many times the rate of AdamW")
    parser.add_argument("--averaged", action="store_true", help="learners average their momentum")
    parser.add_argument("--against", nargs="*", choices=REFERENCES, default=REFERENCES, help="what else is run")
    args = parser.parse_args()
    nano, steps = args.nano.resolve(), args.steps
    model = [f"--n_layer={args.layers}", f"--n_embd={args.width}"]
    prepare(nano, muon=args.muon is not None, averaged=args.averaged)
    os.environ["MUON"] = str(args.muon)
    sizes = {"large": (steps, 3 * BATCH), "small": (3 * steps, BATCH), "third": (steps, BATCH)}
    for seed in args.seeds:
        with_learners(nano, seed, steps, model, args.set)
        for name in args.against:
            train(nano, "train_seeded.py", f"{name}-{seed}", seed, *sizes[name], model).ended()
        names = [*(f"learner-{seed}-{i}" for i in range(3)), *(f"{name}-{seed}" for name in args.against)]
        found = {name: loss(nano, name) for name in names}
        print(" ".join(f"{name}={value:.4f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    tune_allocator()
    main()
