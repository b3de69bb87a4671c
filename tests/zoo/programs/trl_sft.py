"""SFTTrainer of TRL: a tiny Llama learns sums from prompts and completions; the loss is that of completions."""

import argparse
import json
import os
import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from diloco_worker.hf import DilocoCallback  # diloco

LETTERS = [*"0123456789+= ", "<end>"]


def tokenizer():
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def sums(count, seed):
    chance = random.Random(seed)
    pairs = [(chance.randrange(30), chance.randrange(30)) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in pairs]


def make_model():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=13, eos_token_id=13, pad_token_id=13,
    ))  # fmt: skip


@torch.no_grad()
def evaluate(model):
    losses, words = [], tokenizer()
    for one in sums(300, seed=1):
        ids = torch.tensor([words(one["prompt"] + one["completion"]).input_ids])
        labels = ids.clone()
        labels[:, : len(words(one["prompt"]).input_ids)] = -100
        losses.append(model.eval()(input_ids=ids, labels=labels).loss.item())
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 300, "batch": 32, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=3e-3,
                lr_scheduler_type="cosine", use_cpu=True, report_to="none", seed=args.seed, save_strategy="no",
                logging_steps=50, disable_tqdm=True, bf16=False, gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(sums(6000, seed=2)), processing_class=tokenizer(),
            callbacks=[DilocoCallback(os.environ["SHARDS"], learner_id=os.environ["LEARNER"])],  # diloco
        )  # fmt: skip
        trainer.train()
    print(json.dumps({"loss": evaluate(model)}))


if __name__ == "__main__":
    main()
