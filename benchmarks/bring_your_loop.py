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
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from diloco_common.allocator import tune_allocator

BATCH, CONTEXT = 8, 64
MODEL = ["--n_layer=2", "--n_head=4", "--n_embd=96", f"--block_size={CONTEXT}", "--dropout=0.0"]
LOOP = [
    "--dataset=topics", "--device=cpu", "--compile=False", "--dtype=float32", "--gradient_accumulation_steps=1",
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


def prepare(nano: Path) -> None:
    """Data and scripts, in the checkout."""
    folder = nano / "data/topics"
    folder.mkdir(exist_ok=True)
    text = "\n".join(words for _, words in sorted(pydoc_data.topics.topics.items()))
    code = {c: i for i, c in enumerate(sorted(set(text)))}
    data = np.array([code[c] for c in text], dtype=np.uint16)
    held_out = len(data) * 9 // 10
    data[:held_out].tofile(folder / "train.bin")
    data[held_out:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(code)}))
    script = replaced((nano / "train.py").read_text(), *SEED)
    (nano / "train_seeded.py").write_text(script)
    for old, new in LINES:
        script = replaced(script, old, new)
    (nano / "train_learner.py").write_text(script)


def replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise SystemExit(f"train.py has changed: {old!r} is in it {text.count(old)} times")
    return text.replace(old, new)


def train(
    nano: Path, script: str, name: str, seed: int, steps: int, batch: int, shards: str = ""
) -> subprocess.Popen[bytes]:
    """Begin one process of train.py."""
    out = nano / f"out-{name}"
    ends = (
        ["--max_iters=100000000", "--eval_interval=100000000"]
        if shards
        else [f"--max_iters={steps}", f"--eval_interval={steps}"]
    )
    arguments = [
        *MODEL, *LOOP, *ends, f"--batch_size={batch}", f"--lr_decay_iters={steps}", f"--warmup_iters={steps // 10}",
        f"--out_dir={out.name}",
    ]  # fmt: skip
    environment = os.environ | {"SEED": str(seed), "SHARDS": shards, "OMP_NUM_THREADS": "1"}
    with (nano / f"{name}.log").open("w") as log:
        return subprocess.Popen([sys.executable, script, *arguments], cwd=nano, env=environment, stdout=log, stderr=log)


def ended(processes: list[subprocess.Popen[bytes]]) -> None:
    if any(process.wait() for process in processes):
        raise SystemExit("a process failed: see the logs in the checkout")


def with_learners(nano: Path, seed: int, steps: int, port: int) -> None:
    """Three learners and two shards, until the budget is merged."""
    shards = []
    for i in range(2):
        command = [
            sys.executable, "-m", "diloco_server", f"--index={i}", "--count=2", f"--listen=127.0.0.1:{port + i}",
            "--set=run.id=nano", f"--set=run.tokens={3 * steps * BATCH * CONTEXT}", "--set=sync.fragments=6",
        ]  # fmt: skip
        with (nano / f"shard-{i}.log").open("w") as log:
            shards.append(subprocess.Popen(command, stdout=log, stderr=log))
    addresses = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    try:
        names = [f"learner-{seed}-{i}" for i in range(3)]
        ended([train(nano, "train_learner.py", name, seed, steps, BATCH, addresses) for name in names])
    finally:
        for shard in shards:
            shard.terminate()
            shard.wait()


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
    parser.add_argument("--port", type=int, default=52000, help="the first of two")
    args = parser.parse_args()
    nano, steps = args.nano.resolve(), args.steps
    prepare(nano)
    for seed in args.seeds:
        with_learners(nano, seed, steps, args.port)
        for name, count, batch in (("large", steps, 3 * BATCH), ("small", 3 * steps, BATCH), ("third", steps, BATCH)):
            ended([train(nano, "train_seeded.py", f"{name}-{seed}", seed, count, batch)])
        names = [f"learner-{seed}-{i}" for i in range(3)]
        found = {name: loss(nano, name) for name in (*names, f"large-{seed}", f"small-{seed}", f"third-{seed}")}
        print(" ".join(f"{name}={value:.4f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    tune_allocator()
    main()
