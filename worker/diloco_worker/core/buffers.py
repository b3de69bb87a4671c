"""Buffers of the model that its state_dict holds. Learners share them as they share parameters.

How the values of all learners become one (`manifest.Rule`):

    mean        floating point: running means, codebooks, normalizers
    variance    `running_var` beside a `running_mean`: the pooled formula
    most        single integers: counters
    one         indices and masks; the vectors of spectral norm, whose signs are arbitrary, so a mean means nothing

Buffers that nothing trains are frozen, that is, compared and not sent (frozen_tensors.py): packed integers (the weights
of a quantized layer) with the buffers beside them, complex numbers, and tensor subclasses. Non-persistent buffers are
computed, and ignored here.

None of this depends on values, or learners that join at different times would not agree on what is shared. A buffer
with values that cannot be sent (a mask of infinities), or with elements that share memory, is refused by name.

A buffer is looked up at each read and write, since some modules replace theirs. A version overwrites it, even if
learners carry work, because nobody knows which part of a buffer is progress. Two kinds are taken from versions only
at the beginning and the end of training:

- Statistics of layers such as BatchNorm, which training does not read. The pooled variance is that of all data only if
  each learner contributes its own statistics. Were versions written into them, their mean would hide how far apart they
  are, and with H = 1 and a momentum of 0.1 each version would lose nine tenths of that.
- Counters that are ahead of the version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from diloco_common.errors import ModelChanged, UnsupportedModel
from diloco_common.wire.manifest import MEAN, VARIANCE, Dtype, Fragment, Piece, Rule, TensorSpec
from diloco_worker.core import layout, names
from diloco_worker.core.device import used_here

INTEGER_MAX = int(2 / torch.finfo(torch.float32).eps)
"""The largest integer up to which float32 holds all integers."""

_DTYPES: dict[torch.dtype, Dtype] = {getattr(torch, name): name for name in get_args(Dtype)}
_PACKED = (torch.int32, torch.int16, torch.int8, torch.uint8)
_SPECTRAL_NORM = "torch.nn.utils.parametrizations._SpectralNorm"


@dataclass(frozen=True, slots=True)
class Buffer:
    spec: TensorSpec
    owner: dict[str, Tensor | None]
    """`module._buffers`."""
    leaf: str
    is_statistic: bool
    """Whether it belongs to a layer that does not read it in training."""

    @property
    def tensor(self) -> Tensor:
        """The module's current buffer. Raises ModelChanged if its shape differs from when it joined."""
        now = self.owner.get(self.leaf)
        if now is None or now.shape != self.spec.shape:
            found = "gone" if now is None else f"of shape {tuple(now.shape)} now"
            raise ModelChanged(
                f"the buffer {self.spec.name} is {found}, and was {self.spec.shape} when the model joined. Give it its "
                f'full size before `join`, or keep it local: join(private=["{self.spec.name}"]). This learner ends'
            )
        return now.detach()


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of one model, each once, under the smallest of its names."""

    shared: dict[str, Buffer] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Every other name of a shared buffer -> its name in `shared`."""

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """out <- values. `out`: float32 [num_elements]."""
        for piece, buffer in self._of(fragment):
            bounds = piece.tensor_bounds
            out[piece.bounds].copy_(layout.flat(buffer.tensor, bounds.start, bounds.stop))

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        """out <- 0 - values: a contribution holds the values themselves."""
        self.read(fragment, out)
        out.neg_()

    def rounds(self, fragment: Fragment, values: torch.dtype) -> bool:
        """False: rounding of a buffer never counts as training."""
        return False

    def write(self, fragment: Fragment, values: Tensor, *, trains_on: bool = False) -> None:
        """buffers <- values, in place; integers are rounded. `trains_on`: keep the kinds that training owns."""
        used_here(values)
        for piece, buffer in self._of(fragment):
            if trains_on and buffer.is_statistic:
                continue
            tensor, bounds = buffer.tensor, piece.tensor_bounds
            new = values[piece.bounds].to(tensor.device)
            if not tensor.is_floating_point():
                new = new.round()
            new = new.to(tensor.dtype)
            if trains_on and piece.rule == "most":  # in its own dtype: float32 would round a counter
                new = torch.maximum(new, layout.flat(tensor, bounds.start, bounds.stop))
            layout.put(tensor, bounds.start, bounds.stop, new)

    def _of(self, fragment: Fragment) -> Iterator[tuple[Piece, Buffer]]:
        for piece in fragment.pieces:
            yield piece, self.shared[piece.tensor]


def buffers_of(model: nn.Module, private: Collection[str]) -> Buffers:
    """The buffers of a model; `private` names stay local. Reads all values once. Raises UnsupportedModel."""
    name_of = names.canonical(names.buffers(model))
    local = {name_of[name] for name in private}
    found = Buffers()
    for path, module in names.modules(model):
        is_packed = any(_is_packed(buffer) for _, buffer in _persistent(module))
        for leaf, buffer in _persistent(module):
            name = names.join(path, leaf)
            of = name_of[name]
            if of in local:
                continue
            if of != name:
                found.ties[name] = of
            elif is_packed or not _is_plain(buffer):
                found.frozen[name] = buffer
            else:
                if why := _unsendable(buffer):
                    raise UnsupportedModel(
                        f"the buffer {name} {why}, so it cannot be sent: keep it local, "
                        f'join(private=["{name}"]), or register it with persistent=False'
                    )
                has_mean = leaf == VARIANCE and name_of.get(names.join(path, MEAN), name) not in local
                rule = _rule(module, leaf, buffer, has_mean=has_mean)
                spec = TensorSpec(name, tuple(buffer.shape), rule, "buffer", _DTYPES[buffer.dtype])
                found.shared[name] = Buffer(spec, module._buffers, leaf, isinstance(module, _NormBase))
    ties = {name: of for name, of in found.ties.items() if of in found.shared}
    return Buffers(dict(sorted(found.shared.items())), found.frozen, ties)


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for leaf, buffer in module._buffers.items():
        if buffer is not None and leaf not in module._non_persistent_buffers_set:
            yield leaf, buffer


def _is_packed(buffer: Tensor) -> bool:
    return buffer.dtype in _PACKED and buffer.numel() > 1


def _is_plain(buffer: Tensor) -> bool:
    """Whether float32 can represent its elements, by its kind and not by its values."""
    if buffer.dtype not in _DTYPES or buffer.layout is not torch.strided or buffer.is_meta or buffer.is_quantized:
        return False
    return not hasattr(buffer, "__tensor_flatten__")  # a tensor subclass, or spread over several ranks


def _unsendable(buffer: Tensor) -> str:
    """Why its values cannot be sent; "" if they can."""
    if layout.overlaps_itself(buffer):
        return "has elements that are the same memory (as after expand())"
    if buffer.is_floating_point():
        return "" if bool(torch.isfinite(buffer.float()).all()) else "holds infinities or NaN"
    if buffer.dtype is torch.bool or not buffer.numel():
        return ""
    least, most = (int(value) for value in buffer.aminmax())
    return "" if max(-least, most) <= INTEGER_MAX else "holds integers above 2^24, which float32 does not"


def _rule(module: nn.Module, leaf: str, buffer: Tensor, *, has_mean: bool) -> Rule:
    if not buffer.is_floating_point():
        return "most" if buffer.numel() == 1 else "one"
    if _is_direction(module, leaf):
        return "one"
    mean = module._buffers.get(MEAN) if has_mean else None
    if mean is not None and mean.shape == buffer.shape and MEAN not in module._non_persistent_buffers_set:
        return "variance"
    return "mean"


def _is_direction(module: nn.Module, leaf: str) -> bool:
    """Whether it is a singular vector of spectral norm, in either of torch's two implementations."""
    if leaf[-2:] not in ("_u", "_v"):
        return False
    return _SPECTRAL_NORM in names.type_names(module) or f"{leaf[:-2]}_orig" in module._parameters
