"""The tensors of the built-in model, from its settings alone: `diloco up` tells shards which model to require.

Does not import torch, which takes seconds. A test compares the result with the model itself.
"""

from __future__ import annotations

import math

from diloco_common.settings import ModelSettings, Settings, TrainSettings
from diloco_common.wire.manifest import Momentum, TensorSpec, companion_of

BYTES = 256


def swiglu_width(width: int) -> int:
    """8/3 of the width (as many weights as a 4x MLP), rounded up to a multiple of 8."""
    return math.ceil(8 * width / 3 / 8) * 8


def gpt_tensors(settings: ModelSettings) -> list[TensorSpec]:
    width, hidden = settings.width, swiglu_width(settings.width)
    shapes = {"embedding": (BYTES, width), "lm_head": (BYTES, width)}
    for i in range(settings.layers):
        shapes |= {
            f"layers.{i}.qkv": (3 * width, width),
            f"layers.{i}.attention_out": (width, width),
            f"layers.{i}.gate_up": (2 * hidden, width),
            f"layers.{i}.down": (width, hidden),
        }
    means = "embedding", "lm_head"
    return [TensorSpec(f"{name}.weight", shape, "mean" if name in means else "run") for name, shape in shapes.items()]


def built_in_companions(settings: Settings) -> list[TensorSpec]:
    """The momentum of Muon and AdamW, as workers with a built-in `train.optimizer` declare it."""
    train = settings.train
    return [companion_of(spec, _kind(spec, train)) for spec in gpt_tensors(settings.model)]


def _kind(parameter: TensorSpec, train: TrainSettings) -> Momentum:
    """Muon takes the matrices of the layers; AdamW everything else."""
    return "Muon" if train.optimizer == "muon" and parameter.name.startswith("layers.") else "Adam"
