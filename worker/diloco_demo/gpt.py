"""The built-in model: a compact GPT over bytes (RMSNorm, rotary positions, SwiGLU).

Defines the architecture and its deterministic initial values. Embedding and output head are two tensors, not tied. The
norms have no gains, since on a CPU the gradient of a gain costs more than the norm. So every parameter is a matrix.

Shapes: B sequences, T bytes, H heads, D = width / heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco_common.errors import DataError
from diloco_common.settings import ModelSettings
from diloco_demo.shapes import BYTES, swiglu_width

ROTARY_BASE = 10_000.0
INITIAL_STD = 0.02
EVALUATION_TOKENS = 32_768
"""About a second on one CPU core with the default model."""


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.context = settings.context
        self.embedding = nn.Embedding(BYTES, settings.width)
        self.layers = nn.ModuleList(Layer(settings.width, settings.heads) for _ in range(settings.layers))
        self.lm_head = nn.Linear(settings.width, BYTES, bias=False)
        cos, sin = _rotary_table(settings.context, settings.width // settings.heads)
        self.register_buffer("rotary", torch.complex(cos, sin), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits, float32 [B, T, 256] (bfloat16 under autocast), for integer bytes [B, T], T <= context."""
        rotary = self.get_buffer("rotary")[: inputs.shape[1]]
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x, rotary)
        logits: Tensor = self.lm_head(norm(x))
        return logits

    def get_output_embeddings(self) -> nn.Linear:
        """The output head. With some widths, its size alone would not identify it."""
        return self.lm_head

    def hidden_matrices(self) -> list[tuple[nn.Parameter, int]]:
        """The matrices of the layers, each with the number of equal matrices fused along its rows."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        return [(m.get_parameter("weight"), parts) for layer in layers for m, parts in layer.matrices()]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, a float32 scalar; both arguments int64 [B, T]."""
        return F.cross_entropy(self(inputs).flatten(0, 1).float(), targets.flatten())


class Layer(nn.Module):
    """Causal self-attention, then SwiGLU, each on the normed residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        hidden = swiglu_width(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def matrices(self) -> list[tuple[nn.Linear, int]]:
        """Query, key and value are one tensor; gate and up are another."""
        return [(self.qkv, 3), (self.attention_out, 1), (self.gate_up, 2), (self.down, 1)]

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self._attend(norm(x), rotary)
        gate, up = self.gate_up(norm(x)).chunk(2, dim=-1)
        residual: Tensor = x + self.down(F.silu(gate) * up)
        return residual

    def _attend(self, x: Tensor, rotary: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, D]
        mixed = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


def build_gpt(settings: ModelSettings, seed: int) -> GPT:
    """The model with its initial values, float32 on the CPU: a pure function of the arguments.

    Neither reads nor changes torch's global random state.
    """
    with torch.random.fork_rng(devices=[]):
        model = GPT(settings)
    generator = torch.Generator().manual_seed(seed)
    into_residual = INITIAL_STD / math.sqrt(2 * settings.layers)
    for name, parameter in model.named_parameters():
        std = into_residual if name.endswith(("attention_out.weight", "down.weight")) else INITIAL_STD
        nn.init.normal_(parameter, std=std, generator=generator)
    return model


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate each pair of neighbors of [B, H, T, D] by the angle of its position. Keeps the dtype."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotary).flatten(-2).type_as(x)


def _rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [T, D / 2]."""
    frequency = ROTARY_BASE ** -(torch.arange(0, head_width, 2) / head_width)
    angle = torch.arange(context)[:, None] * frequency
    return angle.cos(), angle.sin()


def evaluate(
    model: GPT, held_out: Tensor, context: int, batch: int = 32, max_tokens: int = EVALUATION_TOKENS,
    tell: Callable[[float], None] = lambda share: None,
) -> float:  # fmt: skip
    """Mean cross-entropy in nats per byte over at most `max_tokens` bytes of `held_out` (uint8 [n]).

    Uses windows of `context` bytes, spread evenly over the text without overlap, the same at every call. Runs `batch`
    windows through the model at once, and passes the share done to `tell` after each batch. Raises DataError if the
    text is shorter than two bytes.
    """
    if len(held_out) < 2:
        raise DataError("there is no held-out text to evaluate on: give more data")
    context = min(context, len(held_out) - 1)
    fitting = (len(held_out) - 1) // context
    windows = min(fitting, max(1, max_tokens // context))
    starts = torch.arange(windows) * fitting // windows * context
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    done = 0
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        for some in torch.split(starts, batch):
            text = held_out[some[:, None] + torch.arange(context + 1)].long().to(device)
            total += model.loss(text[:, :-1], text[:, 1:]).double() * len(some)
            done += len(some)
            tell(done / windows)
    return float(total) / windows
