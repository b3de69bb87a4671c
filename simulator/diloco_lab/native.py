"""Inner steps of the built-in model in C (inner_step.c): several times as fast as torch where models are small.

`python -m diloco_lab.native` compiles it beside its source (`diloco_common.codec.library`); `make install` does so.
Without it, with DILOCO_NATIVE=0, and where models are large, torch does the work: the same, but sums are rounded in
another order.
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
CONTEXT_MAX, WIDTH_MAX = 768, 320
"""Beyond them torch is as fast, and soon faster: it multiplies in pieces that fit into the caches."""
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
        self._parameters = sum(parameter.numel() for parameter in shape.parameters())
        assert loaded.lab_parameters(ctypes.byref(self._model)) == self._parameters, "inner_step.c has another model"

    def fits(self, inputs: Tensor) -> bool:
        """Whether windows [R, B, T] are as long as the model's context."""
        return inputs.shape[-1] == self._context

    def step(
        self, rows: Tensor, inputs: Tensor, targets: Tensor, state: tuple[Tensor, Tensor, Tensor], rates: Tensor
    ) -> Tensor:  # fmt: skip
        """A step in place of these rows, int64 [R], of theta, momentum and second moments, float32 [all, P]; rates
        float32 [R, 9], see RATES. Inputs and targets are int64 [R, B, T]. Returns their losses, float32 [R]."""
        return self._call(rows, inputs, targets, state, rates)

    def losses(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of each row of theta, float32 [R, P], on its windows: float32 [R]."""
        return self._call(torch.arange(len(theta)), inputs, targets, (theta,), None)

    def _call(
        self, rows: Tensor, inputs: Tensor, targets: Tensor, state: tuple[Tensor, ...], rates: Tensor | None
    ) -> Tensor:  # fmt: skip
        count, batch, losses = len(rows), inputs.shape[1], torch.empty(len(rows))
        inputs, targets = inputs.contiguous(), targets.contiguous()  # kept here until C has read them
        windows = [_address(of, torch.int64, count, batch, self._context) for of in (inputs, targets)]
        values = [_address(of, torch.float32, len(state[0]), self._parameters) for of in state]
        failed = self._library.lab_inner_steps(
            ctypes.byref(self._model), count, _address(rows, torch.int64, count), batch, *windows,
            *(*values, None, None)[:3],
            None if rates is None else _address(rates, torch.float32, count, len(RATES) + 2), losses.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for an inner step: run fewer jobs at once")
        return losses


def find_for(context: int, width: int) -> ctypes.CDLL | str:
    """The library for models of this size, or why torch does the work."""
    if context > CONTEXT_MAX or width > WIDTH_MAX:
        return f"at contexts above {CONTEXT_MAX} or widths above {WIDTH_MAX} it is as fast or faster"
    return find()


@cache
def find() -> ctypes.CDLL | str:
    """The library, or the reason why it cannot be used."""
    found = LIBRARY.load()
    if isinstance(found, str):
        return found
    _, loaded = found
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    loaded.lab_parameters.restype, loaded.lab_parameters.argtypes = int64, (pointer,)
    loaded.lab_inner_steps.argtypes = (pointer, int64, pointer, int64, *[pointer] * 7)
    return loaded


def _address(values: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """For C, which believes what it is told."""
    assert values.is_cpu
    assert values.is_contiguous()
    assert (values.dtype, values.shape) == (dtype, shape)
    return values.data_ptr()


if __name__ == "__main__":
    built, found = LIBRARY.build(), find()
    if isinstance(found, str):
        sys.exit(f"no native inner steps, torch does them: {built if isinstance(built, str) else found}")
    print(f"native inner steps: {LIBRARY.find()}")
