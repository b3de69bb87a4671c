"""Loops that sit inside a library."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from what_works.script import RATE, Cases, Ground, Script, X, loop, loss_of, small, values

CASES = Cases()
STEPS = 4
VOCABULARY = 48


def of_transformers(kind: str, **options: Any) -> Any:
    """A tiny model, made from its configuration."""
    transformers = pytest.importorskip("transformers", reason="NOT RUN: transformers is not installed")
    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.AutoModelForPreTraining.from_config(transformers.AutoConfig.for_model(kind, **small | options))


def gpt2() -> Any:
    return of_transformers("gpt2", n_layer=2, n_head=2, n_embd=32, n_positions=16)


def text() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def holds_the_global_values(ground: Ground, model: Any) -> None:
    found = ground.pulled()
    for name, theta in values(model, {}).items():
        assert torch.equal(theta, found[name]), name


def trains_with_transformers(ground: Ground, **arguments: Any) -> Any:
    pytest.importorskip("transformers", reason="NOT RUN: transformers is not installed")
    from test_hf_contract import trainer

    training = trainer(ground.shards, ground.folder, max_steps=STEPS, **arguments)
    training.train()
    return training


@CASES("transformers' Trainer with DilocoCallback")
def trainer(ground: Ground) -> None:
    training = trains_with_transformers(ground)
    assert training.diloco.learner.inner_step == STEPS
    holds_the_global_values(ground, training.model)


@CASES("transformers' Trainer with dataloader_num_workers")
def trainer_with_workers(ground: Ground) -> None:
    holds_the_global_values(ground, trains_with_transformers(ground, dataloader_num_workers=2).model)


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": STEPS}
CASES("transformers' Trainer with load_best_model_at_end")(partial(trains_with_transformers, **BEST))


@CASES("transformers models in your own loop")
def own_loop(ground: Ground) -> None:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    model, inputs = of_transformers("t5", **sizes), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    ground.trains(Script(model, loop(model, optimizer, lambda: model(**inputs).loss)))


@CASES("peft: LoRA")
def lora(ground: Ground) -> None:
    peft = pytest.importorskip("peft", reason="NOT RUN: peft is not installed")

    def adapted() -> Any:
        return peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], r=2))

    model = adapted()
    inputs = text()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    ground.trains(Script(model, loop(model, optimizer, lambda: model(**inputs).loss), plain=adapted))


def fits_with_lightning(ground: Ground, **more: Any) -> None:
    pytest.importorskip("lightning", reason="NOT RUN: lightning is not installed")
    from test_lightning_contract import fit

    callback, module = fit(ground.shards, ground.folder, max_steps=STEPS, **more)
    assert callback.learner is not None
    assert callback.learner.inner_step == STEPS
    holds_the_global_values(ground, module)


CASES("Lightning's Trainer with DilocoCallback")(fits_with_lightning)
CASES("Lightning's Trainer with loader workers")(partial(fits_with_lightning, loaders=1))


@CASES("Lightning's Fabric")
def fabric(ground: Ground) -> None:
    lightning = pytest.importorskip("lightning", reason="NOT RUN: lightning is not installed")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    plain = small()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), RATE))
    ground.trains(Script(plain, backward_by(fabric, model, optimizer), plain=small))


@CASES("Accelerate")
def accelerate(ground: Ground) -> None:
    accelerate = pytest.importorskip("accelerate", reason="NOT RUN: accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    plain = small()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), RATE))
    step = backward_by(accelerator, model, optimizer)

    def accumulating() -> Tensor:
        with accelerator.accumulate(model):
            return step()

    ground.trains(Script(model, accumulating, plain=small))


def backward_by(library: Any, model: Any, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    """The usual pass of a loop, but for who calls `backward`."""

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        library.backward(loss)
        optimizer.step()
        return loss

    return step


@CASES("a loop inside another library: learner.follow(optimizer)")
def followed(ground: Ground) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with ground.learner(model, "script") as learner:
        learner.follow(optimizer, samples=len(X))
        step = loop(model, optimizer)
        for _ in range(STEPS):
            step()
        assert learner.inner_step == STEPS
        assert learner.finish()
    holds_the_global_values(ground, model)
