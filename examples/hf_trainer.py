"""Hugging Face's Trainer as a learner: one extra line. Needs pip install 'decoupled-diloco[hf]'.

diloco-server --listen 127.0.0.1:50051 --set run.id=trainer --set run.tokens=150_000
python examples/hf_trainer.py 127.0.0.1:50051 runs/trainer       # as many as you like, each with a folder of its own

In a container of docker-compose.yml the environment has the run, the certificate, and where to serve (docs/deploy.md).
"""

import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from diloco_worker.hf import DilocoCallback

CONTEXT = 32


def bytes_of_this_repository() -> list[dict[str, torch.Tensor]]:
    """Its documentation as windows of bytes, each both input and label."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.parent.glob("docs/*.md")))
    windows = torch.tensor(list(text[: len(text) // CONTEXT * CONTEXT])).view(-1, CONTEXT)
    return [{"input_ids": window, "labels": window} for window in windows]


def tiny() -> GPT2Config:
    return GPT2Config(
        n_layer=2, n_head=2, n_embd=64, n_positions=CONTEXT, vocab_size=256, bos_token_id=0, eos_token_id=0
    )


def main(shards: str, folder: str) -> None:
    model = GPT2LMHeadModel(tiny())
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=16, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=0.05,
        max_steps=100_000, logging_steps=20, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = DilocoCallback(
        shards, run=os.environ.get("DILOCO_RUN__ID", "trainer"), tls=os.environ.get("DILOCO_SECURITY__TLS"),
        http=os.environ.get("DILOCO_WORKER__HTTP"),
    )  # fmt: skip

    Trainer(model, arguments, train_dataset=bytes_of_this_repository(), callbacks=[callback]).train()

    loaded = GPT2LMHeadModel.from_pretrained(f"{folder}/global")  # the global model, as the callback has saved it
    learner = callback.learner
    print(f"{learner.learner_id}: {loaded.num_parameters()} parameters, after {learner.inner_step} steps")


if __name__ == "__main__":
    shards, folder = [*sys.argv[1:], *["127.0.0.1:50051", "runs/trainer"][len(sys.argv) - 1 :]]
    main(shards, folder)
