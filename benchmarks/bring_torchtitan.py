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
import os
import pydoc_data.topics
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from diloco_common.allocator import tune_allocator
from light_learners import running_shard

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


def begin(titan: Path, folder: Path, config: list[str], ranks: int) -> subprocess.Popen[bytes]:
    """One learner, or torchtitan by itself, in a folder of its own."""
    folder.mkdir()
    (folder / "tests").symlink_to(folder.parent / "tests")
    (folder / "train.py").write_text(ON_CPU)
    path = os.pathsep.join([str(titan), str(ADAPTER), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py",
        *config, f"--training.num_tokens_per_microbatch_per_dp_rank={TOKENS}", "--training.max_context_length=256",
        "--training.mixed_precision_param=float32", "--training.disable_cuda_graphs",
        "--parallelism.spmd_backend=partial_dtensor", "--metrics.log_freq=5",
        "--lr_scheduler.warmup_steps=10", "--dataloader.seed=" + str(sum(map(ord, folder.name))),
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def ended(process: subprocess.Popen[bytes], folder: Path) -> str:
    """The last lines of the log that have a loss."""
    failed, said = process.wait(), (folder / "log").read_text()
    if failed:
        raise SystemExit(said[-6000:])
    return re.sub("\x1b\\[[0-9;]*m", "", "\n".join([line for line in said.splitlines() if "loss:" in line][-3:]))


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
        texts = [{"text": words} for _, words in sorted(pydoc_data.topics.topics.items())]
        (folder / "tests/assets/c4_test/data.json").write_text("\n".join(map(json.dumps, texts)))
        settings = ["run.id=titan", f"run.tokens={args.steps * TOKENS * sum(RANKS)}", "shard.count=2"]
        with running_shard(*settings, "shard.index=0") as first, running_shard(*settings, "shard.index=1") as second:
            learner = [
                "--module=learner", "--config=llama3_debugmodel", f"--shards={first.address},{second.address}",
                "--training.steps=100000", f"--lr_scheduler.total_steps={args.steps}", "--checkpoint.enable",
                "--checkpoint.interval=100000",
            ]  # fmt: skip
            folders = [folder / f"learner-{i}" for i in range(len(RANKS))]
            running = [begin(titan, one, learner, ranks) for one, ranks in zip(folders, RANKS, strict=True)]
            try:
                for one, process in zip(folders, running, strict=True):
                    print(one.name, ended(process, one), sep="\n", flush=True)
            finally:
                for process in running:
                    process.terminate()
        alone = ["--module=llama3", "--config=llama3_debugmodel", f"--training.steps={args.steps}"]
        large = folder / "large"
        batch = f"--training.num_tokens_per_train_step={TOKENS * sum(RANKS)}"
        print("large", ended(begin(titan, large, [*alone, batch], 1), large), sep="\n", flush=True)


if __name__ == "__main__":
    tune_allocator()
    main()
