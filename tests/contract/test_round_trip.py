"""Trained, pulled, and loaded by transformers or PEFT: the model of `finish`, or a refusal. More: `round_trip.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip(
    "transformers", reason="NOT RUN: transformers is not installed (pip install 'decoupled-diloco[hf]')"
)
pytest.importorskip("peft", reason="NOT RUN: peft is not installed (pip install peft)")
from round_trip import Draw, draws, run

GPT2 = Draw("GPT2LMHeadModel", "none", "default", "none", "nothing", "float32", "float32", "safetensors", "")
LLAMA = replace(GPT2, family="LlamaForCausalLM")


@pytest.mark.parametrize(
    ("about", "drawn", "comes_out"),
    [
        ("in two modules, bin, frozen", replace(GPT2, wrapper="nested", base="bin", frozen="half"), "equal"),
        ("in a dict, bfloat16, shards", replace(GPT2, wrapper="dict", base="sharded", dtype="bfloat16"), "equal"),
        ("with a loss of its own", replace(GPT2, wrapper="with a loss"), "refused"),
        ("without that loss", replace(GPT2, wrapper="with a loss", flags="--strip"), "equal"),
        ("two models", replace(GPT2, wrapper="two"), "refused"),
        ("a configuration alone", replace(GPT2, base="config"), "equal"),
        ("a configuration, and a frozen half", replace(GPT2, base="config", frozen="half"), "equal"),
        ("a configuration, a large half", replace(GPT2, base="config", frozen="half", is_large=True), "refused"),
        ("a base without the head", replace(LLAMA, base="headless"), "refused"),
        ("another base", replace(GPT2, base="another"), "equal"),
        ("another base, of which a half is needed", replace(GPT2, base="another", frozen="half"), "equal"),
        ("another base, a large half", replace(GPT2, base="another", frozen="half", is_large=True), "refused"),
        ("experts", replace(GPT2, family="MixtralForCausalLM", wrapper="module"), "equal"),
        ("more experts", replace(GPT2, family="Qwen3MoeForCausalLM", frozen="half"), "equal"),
        ("a tied head", replace(GPT2, family="Qwen2ForCausalLM"), "equal"),
        ("masked words", replace(GPT2, family="BertForMaskedLM"), "equal"),
        ("pictures", replace(GPT2, family="ViTForImageClassification"), "equal"),
        ("a pair", replace(GPT2, family="T5ForConditionalGeneration", wrapper="list"), "equal"),
        ("BatchNorm", replace(GPT2, family="ResNetForImageClassification", wrapper="module"), "equal"),
        ("an adapter called mine", replace(LLAMA, adapter="lora", name="mine", wrapper="module"), "equal"),
        ("a configuration of LoRA", replace(LLAMA, adapter="lora", name="mine", base="config"), "refused"),
        ("half a LoRA", replace(LLAMA, adapter="lora", base="config", frozen="half"), "refused"),
        ("magnitudes", replace(LLAMA, adapter="dora", name="mine"), "equal"),
        ("modules_to_save", replace(LLAMA, adapter="lora with a head", name="mine"), "equal"),
        ("biases", replace(GPT2, adapter="lora with biases"), "equal"),
        ("without a PeftModel", replace(LLAMA, adapter="add_adapter", wrapper="list"), "equal"),
        ("prompts", replace(LLAMA, adapter="prompt"), "equal"),
        ("a projected prefix", replace(LLAMA, adapter="projected prefix", name="mine", wrapper="module"), "equal"),
        ("p-tuning", replace(LLAMA, adapter="p-tuning"), "equal"),
        ("no file of the adapter", replace(LLAMA, adapter="ia3", base="config"), "refused"),
        ("an adapter without a base", replace(LLAMA, adapter="lora", base="none"), "equal"),
        ("an adapter without a base, large", replace(LLAMA, adapter="lora", base="none", is_large=True), "refused"),
    ],
)  # fmt: skip
def test_what_comes_out_is_what_was_trained(loop, about, drawn, comes_out):
    what, words = run(drawn, loop)
    assert what == comes_out, f"{about}: {words}"


def test_nothing_that_is_drawn_comes_out_wrong():
    said: list[str] = []
    assert not draws(4, seed=45, tell=said.append)["silent"], "\n".join(said)
