"""Inner steps of the built-in model in C (inner_step.c): several times as fast as torch where models are small.

`python -m diloco_lab.native` compiles it beside its source (`diloco_common.codec.library`); `make install` does so.
Without it, or with DILOCO_NATIVE=0, torch does the work: the same, but sums are rounded in another order.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from diloco_common.codec.library import Library
from diloco_demo.gpt import GPT, Layer

LIBRARY = Library(
    Path(__file__).parent, "inner_step",
    # Sums in any order. Not -ffast-math: whoever loads such a library has no subnormal numbers any more.
    ("-O3", "-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
     "-shared", "-fPIC"),
    "python -m diloco_lab.native",
)  # fmt: skip
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
    """Steps models of one shape, and says their losses. Tensors are contiguous, on the CPU."""

    def __init__(self, loaded: ctypes.CDLL, shape: GPT, is_muon: bool) -> None:
        rotary = shape.get_buffer("rotary")
        self._angles = rotary.real.contiguous(), rotary.imag.contiguous()
        layers = [layer for layer in shape.layers if isinstance(layer, Layer)]
        self._library, self._context = loaded, shape.context
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
        theta, momentum, second = (*(values.data_ptr() for values in state), None, None)[:3]
        failed = self._library.lab_inner_steps(
            ctypes.byref(self._model), len(rows), rows.data_ptr(), inputs.shape[1], inputs.data_ptr(),
            targets.data_ptr(), theta, momentum, second, None if rates is None else rates.data_ptr(), losses.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for an inner step: run fewer jobs at once")
        return losses


@cache
def find() -> ctypes.CDLL | str:
    """The library, or the reason why it cannot be used."""
    found = LIBRARY.load()
    if isinstance(found, str):
        return found
    _, loaded = found
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    loaded.lab_inner_steps.argtypes = (pointer, int64, pointer, int64, *[pointer] * 7)
    return loaded


if __name__ == "__main__":
    built, found = LIBRARY.build(), find()
    if isinstance(found, str):
        sys.exit(f"no native inner steps, torch does them: {built if isinstance(built, str) else found}")
    print(f"native inner steps: {LIBRARY.find()}")
