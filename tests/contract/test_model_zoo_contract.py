"""Models of Hugging Face, tiny and made from their configuration: train, finish, pull, load with from_pretrained.

What `from_pretrained` loads computes what the learner's own module computes, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import settings_with
from torch import Tensor, nn

import diloco_worker
from diloco_common.program import main

transformers = pytest.importorskip(
    "transformers", reason="NOT RUN: transformers is not installed (pip install 'decoupled-diloco[hf]')"
)
VOCABULARY = 48
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


@dataclass(frozen=True)
class Kind:
    """A model, made from its configuration, and what goes into it."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[torch.Generator], dict[str, Tensor]]


def text(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def image(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}


GPT2 = Kind("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16}, text)
KINDS = {
    "gpt2": GPT2,
    "llama": Kind("LlamaForCausalLM", "LlamaConfig", LAYERS | {"num_key_value_heads": 1}, text),
    "qwen": Kind(
        "Qwen3ForCausalLM", "Qwen3Config",
        LAYERS | {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}, text,
    ),
    "gpt-neo": Kind(
        "GPTNeoForCausalLM", "GPTNeoConfig",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 16,
         "attention_types": [[["global", "local"], 1]]}, text,
    ),
    "bert": Kind("BertForMaskedLM", "BertConfig", LAYERS | {"max_position_embeddings": 16}, text),
    "t5": Kind(
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}, text,
    ),
    "vit": Kind("ViTForImageClassification", "ViTConfig", LAYERS | {"image_size": 16, "patch_size": 8}, image),
}  # fmt: skip


def made(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    options = kind.options if kind.inputs is image else SMALL | kind.options
    model: nn.Module = getattr(transformers, kind.model)(getattr(transformers, kind.config)(**options))
    return model


def train(shards: str, model: nn.Module, kind: Kind) -> None:
    """Until the budget is merged; the model is the global one then."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with diloco_worker.join(shards, model, learner_id="a", wait_s=20) as learner:
        while not learner.done:
            loss = model(**kind.inputs(generator)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=16, loss=loss)
        assert learner.finish()


@torch.no_grad()
def logits(model: nn.Module, kind: Kind) -> Tensor:
    found: Tensor = model.eval()(**kind.inputs(torch.Generator().manual_seed(2))).logits
    return found


def pull(shards: str, config: Path, out: Path, *more: str) -> None:
    assert main(["pull", "--shards", shards, "--out", str(out), "--base", str(config), *more]) == 0


@pytest.fixture
def shards(serve) -> str:
    exact = {"push": "float32", "pull": "float32", "quorum": 1, "fragments": 5}
    started = [serve(settings_with(run={"tokens": 160}, sync=exact, shard={"index": i, "count": 2})) for i in range(2)]
    return ",".join(shard.address for shard in started)


def assert_loads(kind: Kind, folder: Path, trained: nn.Module, **options: Any) -> None:
    loaded, info = getattr(transformers, kind.model).from_pretrained(folder, output_loading_info=True, **options)
    assert {name: keys for name, keys in info.items() if keys} == {}
    assert torch.equal(logits(loaded, kind), logits(trained, kind))


@pytest.mark.parametrize("name", KINDS)
def test_what_was_trained_is_what_from_pretrained_loads(shards, tmp_path, name):
    kind = KINDS[name]
    model = made(kind)
    model.config.save_pretrained(tmp_path / "config")
    before = logits(model, kind)

    train(shards, model.train(), kind)
    pull(shards, tmp_path / "config", tmp_path / "out")

    assert not torch.equal(logits(model, kind), before)
    assert_loads(kind, tmp_path / "out", model)


def test_a_model_in_bfloat16(shards, tmp_path):
    model = made(GPT2).bfloat16()
    model.config.save_pretrained(tmp_path / "config")
    train(shards, model, GPT2)
    pull(shards, tmp_path / "config", tmp_path / "out", "--dtype", "bfloat16")
    assert_loads(GPT2, tmp_path / "out", model, dtype=torch.bfloat16)


def test_a_lora(shards, tmp_path):
    peft = pytest.importorskip("peft", reason="NOT RUN: peft is not installed")
    base = made(GPT2)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], r=2, init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")

    train(shards, model, GPT2)
    pull(shards, tmp_path / "adapter", tmp_path / "out")

    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, tmp_path / "out"), GPT2), logits(model, GPT2))
