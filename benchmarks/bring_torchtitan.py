"""Trains torchtitan's own Trainer as learners of one run, on CPUs. Numbers of docs/bring-your-loop.md.

    git clone https://github.com/pytorch/torchtitan      # its dependencies, and triton, in this environment
    python benchmarks/bring_torchtitan.py torchtitan --steps 60

    learners    an island of two ranks and one of one, each by torchrun, with examples/torchtitan/learner.py; two shards
    large       torchtitan by itself: one rank, with the batches of both learners, equal tokens

The model is torchtitan's llama3 debugmodel, the text that of bring_your_loop.py. torchtitan wants a GPU: `ON_CPU` is
what is put in its place. The loss printed is the last one that torchtitan's log has, in nats per token.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

from diloco_common.allocator import tune_allocator
from foreign_loop import Running, all_ended, begin_ranks
from light_learners import running_shards
from topics import topics

TOKENS = 1024
"""Of one rank and step."""
RANKS = (2, 1)
"""Of each learner."""
ADAPTER = Path(__file__).parents[1] / "examples" / "torchtitan"
ON_CPU = """
import types

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import torchtitan.tools.utils as utils

cpu = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
cpu.get_device_name = lambda device=None: "CPU"
cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**34)
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
cpu.memory_stats = lambda device=None: {}
utils.device_type, utils.device_module = "cpu", cpu

from torchtitan.distributed import utils as distributed
from torchtitan.models.common import attention

distributed.set_pg_timeouts = lambda **timeouts: None  # its barrier names a device


def attend(self, q_TNH, k_TNH, v_TNH, *, attention_masks, scale=None, enable_gqa=False, **kwargs):
    # FlexAttention has no backward pass on CPUs.
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TNH, k_TNH, v_TNH))
    mask = create_mask(attention_masks.mask_mod, 1, 1, q.shape[2], k.shape[2], device="cpu")
    out = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return out.squeeze(0).transpose(0, 1)


divide = FSDPModule.set_gradient_divide_factor


def divide_by_sums(self, factor):
    self.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    divide(self, factor)


FSDPModule.set_gradient_divide_factor = divide_by_sums
attention.FlexAttention.forward = attend
attention._compiled_create_block_mask = create_block_mask

from torchtitan.train import main

main()
"""


def begin(titan: Path, folder: Path, config: list[str], ranks: int) -> Running:
    """One learner, or torchtitan by itself, in a folder of its own."""
    folder.mkdir()
    (folder / "tests").symlink_to(folder.parent / "tests")
    arguments = [
        *config, f"--training.num_tokens_per_microbatch_per_dp_rank={TOKENS}", "--training.max_context_length=256",
        "--training.mixed_precision_param=float32", "--training.disable_cuda_graphs",
        "--parallelism.spmd_backend=partial_dtensor", "--metrics.log_freq=5",
        "--lr_scheduler.warmup_steps=10", "--dataloader.seed=" + str(sum(map(ord, folder.name))),
    ]  # fmt: skip
    return begin_ranks(ranks, ON_CPU, arguments, folder, [titan, ADAPTER], HF_HUB_OFFLINE="1")


def show(name: str, said: str) -> None:
    """The last lines that have a loss."""
    lines = [line for line in said.splitlines() if "loss:" in line][-3:]
    print(name, re.sub("\x1b\\[[0-9;]*m", "", "\n".join(lines)), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("titan", type=Path, help="a checkout of torchtitan")
    parser.add_argument("--steps", type=int, default=100, help="of the run by itself")
    args = parser.parse_args()
    titan: Path = args.titan.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tests/assets/c4_test").mkdir(parents=True)
        (folder / "tests/assets/tokenizer").symlink_to(titan / "tests/assets/tokenizer")
        texts = [{"text": words} for words in topics()]
        (folder / "tests/assets/c4_test/data.json").write_text("\n".join(map(json.dumps, texts)))
        with running_shards(2, "run.id=titan", f"run.tokens={args.steps * TOKENS * sum(RANKS)}") as shards:
            learner = [
                "--module=learner", "--config=llama3_debugmodel",
                f"--shards={','.join(shard.address for shard in shards)}", "--training.steps=100000",
                f"--lr_scheduler.total_steps={args.steps}", "--checkpoint.enable", "--checkpoint.interval=100000",
            ]  # fmt: skip
            folders = [folder / f"learner-{i}" for i in range(len(RANKS))]
            running = [begin(titan, one, learner, ranks) for one, ranks in zip(folders, RANKS, strict=True)]
            for one, said in zip(folders, all_ended(running), strict=True):
                show(one.name, said)
        alone = ["--module=llama3", "--config=llama3_debugmodel", f"--training.steps={args.steps}"]
        batch = f"--training.num_tokens_per_train_step={TOKENS * sum(RANKS)}"
        show("large", begin(titan, folder / "large", [*alone, batch], 1).ended())


if __name__ == "__main__":
    tune_allocator()
    main()
