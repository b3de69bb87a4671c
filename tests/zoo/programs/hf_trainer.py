"""The Trainer of Hugging Face with two loader workers: a tiny GPT-2 of bytes."""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from diloco_worker.hf import DilocoCallback  # diloco

TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)
TRAIN, HELD_OUT = TEXT[:-8192], TEXT[-8192:]


class Pieces(Dataset):
    def __len__(self):
        return len(TRAIN) // 32

    def __getitem__(self, index):
        piece = TRAIN[index * 32 : index * 32 + 32]
        return {"input_ids": piece, "labels": piece}


def make_model():
    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@torch.no_grad()
def evaluate(model):
    x = HELD_OUT.view(-1, 32)
    return model.eval()(input_ids=x, labels=x).loss.item()


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 500, "batch": 16, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=3e-3,
                lr_scheduler_type="cosine", dataloader_num_workers=2, use_cpu=True, report_to="none", seed=args.seed,
                save_strategy="no", logging_steps=50, disable_tqdm=True,
            ),
            train_dataset=Pieces(),
            callbacks=[DilocoCallback(os.environ["SHARDS"], learner_id=os.environ["LEARNER"])],  # diloco
        )  # fmt: skip
        trainer.train()
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
