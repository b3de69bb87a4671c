"""An adapter (LoRA) on a frozen base, which is never sent. Needs pip install 'decoupled-diloco[hf]' peft.

diloco-server --listen 127.0.0.1:50051 --set run.id=lora --set run.tokens=60_000
python examples/lora.py 127.0.0.1:50051 runs/lora                # as many as you like
diloco pull --shards 127.0.0.1:50051 --run lora --base runs/lora --out runs/lora-global
"""

import sys
from pathlib import Path

import torch
from hf_trainer import bytes_of_this_repository, tiny
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2LMHeadModel

import diloco_worker


def base() -> GPT2LMHeadModel:
    """Stands for a checkpoint that all learners have loaded. If it is not the same for all, `join` refuses it."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(tiny())


def main(shards: str, folder: Path) -> None:
    model = get_peft_model(base(), LoraConfig(target_modules=["c_attn", "c_fc"], r=4, fan_in_fan_out=True))
    model.peft_config["default"].save_pretrained(folder)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    windows = torch.stack([window["input_ids"] for window in bytes_of_this_repository()])

    with diloco_worker.join(shards, model, run="lora") as learner:
        generator = torch.Generator().manual_seed(learner.seed)
        while not learner.done:
            batch = windows[torch.randint(len(windows), (8,), generator=generator)]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=batch.numel(), loss=loss)
        learner.finish()

    model.save_pretrained(folder)  # the adapter alone
    again = PeftModel.from_pretrained(base(), folder)
    trained = sum(p.numel() for name, p in again.named_parameters() if "lora_" in name)
    print(f"{learner.learner_id}: an adapter of {trained} parameters, after {learner.inner_step} steps")


if __name__ == "__main__":
    shards, folder = [*sys.argv[1:], *["127.0.0.1:50051", "runs/lora"][len(sys.argv) - 1 :]]
    main(shards, Path(folder))
