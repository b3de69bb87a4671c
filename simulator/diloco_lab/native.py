"""Inner steps of the built-in model in C (inner_step.c): several times as fast as torch where models are small.

`python -m diloco_lab.native` compiles it for this CPU, beside its source; `make install` does so. Without it, or with
DILOCO_NATIVE=0, torch does the work: the same to 1e-5.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from diloco_common.codec import library
from diloco_demo.gpt import GPT, Layer

SOURCE = Path(__file__).with_name("inner_step.c")
FLAGS = (
    "-O3", "-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
    "-shared", "-fPIC",
)  # fmt: skip
"""Sums in any order. Not -ffast-math: whoever loads such a library has no subnormal numbers any more."""
RATES = ("lr", "muon_lr", "muon_momentum", "beta1", "beta2", "weight_decay", "clip")
"""Of a row; its share of them and its count of steps follow."""


class _Model(ctypes.Structure):
    """`struct model`."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("layers", "width", "hidden", "heads", "context", "is_muon")),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
    )


class Kernel:
    """Steps models of one shape, and says their losses. State and rates are contiguous tensors on the CPU."""

    def __init__(self, function: Callable[..., int], shape: GPT, is_muon: bool) -> None:
        rotary = shape.get_buffer("rotary")
        self._angles = rotary.real.contiguous(), rotary.imag.contiguous()
        layers = [layer for layer in shape.layers if isinstance(layer, Layer)]
        self._function, self._context = function, shape.context
        self._model = _Model(
            len(layers), shape.embedding.embedding_dim, layers[0].down.in_features, layers[0].heads, shape.context,
            is_muon, *(angle.data_ptr() for angle in self._angles),
        )  # fmt: skip

    def fits(self, inputs: Tensor) -> bool:
        """Whether windows [R, B, T] are as long as the model's context."""
        return inputs.shape[-1] == self._context

    def step(
        self, rows: Tensor, inputs: Tensor, targets: Tensor, state: tuple[Tensor, Tensor, Tensor], rates: Tensor
    ) -> Tensor:  # fmt: skip
        """A step in place of these rows, int64 [R], of theta, momentum and second moments, float32 [all, P]; rates
        float32 [R, 9], see RATES. Inputs and targets are int64 [R, B, T]. Returns their losses, float32 [R]."""
        assert rates.shape == (len(rows), len(RATES) + 2)
        return self._call(rows, inputs, targets, state, rates)

    def losses(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of each row of theta, float32 [R, P], on its windows: float32 [R]."""
        return self._call(torch.arange(len(theta)), inputs, targets, (theta,), None)

    def _call(
        self, rows: Tensor, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...], rates: Tensor | None
    ) -> Tensor:  # fmt: skip
        inputs, targets, losses = inputs.contiguous(), targets.contiguous(), torch.empty(len(rows))
        floats = state if rates is None else (*state, rates)
        assert all(values.is_contiguous() and values.dtype == torch.float32 for values in floats)
        theta, momentum, second = (*(values.data_ptr() for values in state), 0, 0)[:3]
        failed = self._function(
            ctypes.byref(self._model), ctypes.c_int64(len(rows)), ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_int64(inputs.shape[1]), ctypes.c_void_p(inputs.data_ptr()), ctypes.c_void_p(targets.data_ptr()),
            ctypes.c_void_p(theta), ctypes.c_void_p(momentum), ctypes.c_void_p(second),
            ctypes.c_void_p(0 if rates is None else rates.data_ptr()), ctypes.c_void_p(losses.data_ptr()),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for an inner step: run fewer jobs at once")
        return losses


@cache
def find() -> Callable[..., int] | None:
    """The function of inner_step.c; None where it has not been built, or cannot be loaded."""
    sets = library.fitting()
    if os.environ.get("DILOCO_NATIVE", "1") == "0" or not sets:
        return None
    try:
        function: Callable[..., int] = ctypes.CDLL(str(_built(sets[0]))).lab_inner_steps
    except OSError:
        return None
    return function


def build() -> str:
    """Compile it for this CPU. Returns where it is, or why it is not."""
    if not (sets := library.fitting()):
        return "not built: there is no vector instruction set here that is known"
    path = _built(sets[0])
    try:
        library.compile_here(os.environ.get("CC", "cc"), sets[0], path, FLAGS, [SOURCE])
    except (OSError, subprocess.SubprocessError) as error:
        return f"not built, so torch does its work: {error}"
    for stale in set(path.parent.glob("inner_step-*.so")) - {path}:
        stale.unlink(missing_ok=True)
    return str(path)


def _built(one: library.InstructionSet) -> Path:
    """Where the library for these instructions is, of this source."""
    return SOURCE.with_name(f"inner_step-{library.digest((*FLAGS, *one.flags), [SOURCE])}.so")


if __name__ == "__main__":
    print(f"inner steps of the lab in C: {build()}")
