"""Trains the FSDP2 example of pytorch/examples as learners of one run. Numbers of docs/bring-your-loop.md.

    git clone https://github.com/pytorch/examples pytorch-examples
    python benchmarks/bring_fsdp2.py pytorch-examples/distributed/FSDP2 --seeds 1 2

    learners    an island of two ranks and two of one rank, each by torchrun, with the lines of the page; two shards
    large       the example by itself: two ranks, together with the batches of all three learners, equal tokens

Its batches are random numbers and its loss is a sum, so it is given text and the loss of the next character: that of
bring_your_loop.py. The loss printed is that of the held-out tenth, in nats per character, of the model that the example
has saved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from diloco_common.allocator import tune_allocator
from foreign_loop import Running, all_ended, begin_ranks, changed
from light_learners import running_shards
from topics import characters

ROWS, CONTEXT = 32, 64
RANKS = (2, 1, 1)
"""Of each learner."""
ON_CPU = [
    # what keeps it from a CPU -> what is there instead
    ("    if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "    if False:"),
    ("init_process_group(backend=backend, device_id=device)", "init_process_group(backend=backend)"),
]
RESET = (
    # it leaves its blocks as the memory was
    "        model.reset_parameters()\n",
    "        model.reset_parameters()\n        for layer in model.layers:\n            layer.reset_parameters()\n",
)
TEXT = [
    RESET,
    (
        "        x = torch.randint(0, vocab_size, (batch_size, seq_len), device=device)\n",
        "        at = torch.randint(0, len(text) - seq_len, (batch_size,)).tolist()\n"
        "        x, y = (torch.stack([text[i + k : i + k + seq_len] for i in at]).long() for k in (0, 1))\n",
    ),
    ("loss = model(x).sum()", "loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())"),
    ("    batch_size = 32\n", "    batch_size = int(os.environ['ROWS'])\n"),
    ("    seq_len = 64\n", "    seq_len = 64\n    text = torch.load(os.environ['TEXT'])\n"),
    ("    torch.manual_seed(0)\n", "    torch.manual_seed(int(os.environ['SEED']))\n"),
]
ALONE = [
    (
        "    for _ in range(10):\n",
        "    torch.manual_seed(100 * int(os.environ['SEED']) + rank)\n    for _ in range(STEPS):\n",
    ),
]
LINES = [
    # the example's line -> with the lines of the page
    ("import torch\nfrom checkpoint", "import torch\nimport diloco_worker\nfrom checkpoint"),
    (
        "    for _ in range(10):\n",
        "    world = torch.distributed.group.WORLD\n"
        "    learner = diloco_worker.join(os.environ['SHARDS'], model, run='fsdp2', island=world)\n"
        "    torch.manual_seed(learner.seed + rank)\n"
        "    while not learner.done:\n",
    ),
    ("        optim.zero_grad()\n", "        optim.zero_grad()\n        learner.step(tokens=x.numel(), loss=loss)\n"),
    ("    checkpointer.save(", "    learner.finish()\n    checkpointer.save("),
]


def begin(example: Path, folder: Path, script: str, ranks: int, seed: int, rows: int, shards: str = "") -> Running:
    """One learner, or the example by itself, in a folder of its own, where it leaves its checkpoint."""
    folder.mkdir()
    text = str(folder.parent / "train.pt")
    return begin_ranks(ranks, script, [], folder, [example], SEED=str(seed), ROWS=str(rows), SHARDS=shards, TEXT=text)


@torch.no_grad()
def loss(example: Path, folder: Path, text: torch.Tensor) -> float:
    """Of the held-out text, under what the example has saved."""
    sys.path.insert(0, str(example))
    from model import ModelArgs, Transformer  # type: ignore[import-not-found]

    (saved,) = folder.glob("checkpoints/*/*/model_state_dict.pt")
    model = Transformer(ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=CONTEXT, dropout_p=0)).eval()
    model.load_state_dict(torch.load(saved))
    windows = (len(text) - 1) // CONTEXT
    x, y = (text[i : i + windows * CONTEXT].view(windows, CONTEXT).long() for i in (0, 1))
    sums = [
        float(cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum"))
        for a, b in zip(x.split(256), y.split(256), strict=True)
    ]
    return sum(sums) / y.numel()


def learners(example: Path, folder: Path, source: str, seed: int, tokens: int) -> list[Path]:
    """Train them to the end of the run."""
    script = changed(source, [*ON_CPU, *TEXT, *LINES])
    folders = [folder / f"learner-{seed}-{i}" for i in range(len(RANKS))]
    with running_shards(2, "run.id=fsdp2", f"run.tokens={tokens}", "sync.fragments=6") as shards:
        addresses = ",".join(shard.address for shard in shards)
        running = [begin(example, one, script, n, seed, ROWS, addresses) for one, n in zip(folders, RANKS, strict=True)]
        all_ended(running)
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, help="distributed/FSDP2 of a checkout of pytorch/examples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=400, help="of the run by itself")
    args = parser.parse_args()
    example: Path = args.example.resolve()
    source = (example / "example.py").read_text()
    text = torch.from_numpy(characters()).short()
    held_out = text[len(text) * 9 // 10 :]
    rows = ROWS * sum(RANKS) // 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        torch.save(text[: len(text) * 9 // 10], folder / "train.pt")
        for seed in args.seeds:
            folders = learners(example, folder, source, seed, args.steps * 2 * rows * CONTEXT)
            alone = [(old, new.replace("STEPS", str(args.steps))) for old, new in ALONE]
            large = folder / f"large-{seed}"
            begin(example, large, changed(source, [*ON_CPU, *TEXT, *alone]), 2, seed, rows).ended()
            found = {one.name: loss(example, one, held_out) for one in (*folders, large)}
            print(" ".join(f"{name}={value:.4f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    tune_allocator()
    main()
