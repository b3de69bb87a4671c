"""Buffers that belong to the model: those that a checkpoint of it holds. Learners share them as they do parameters.

What becomes one value, and how (`manifest.Rule`):

    mean        floating point: running means, codebooks, normalizers
    variance    `running_var` beside a `running_mean`: the pooled formula
    most        single integers: counters
    one         indices and masks; the vectors of spectral norm, which have no mean, as their signs are arbitrary

Frozen, that is compared and not sent (frozen_tensors.py), are the buffers that nothing trains: packed integers, which
are the weights of a quantised layer, with all that lies beside them; complex numbers; what is no plain tensor.
Buffers that are not persistent are computed, and nobody looks at them.

Values decide nothing of this: learners that join at different times would not agree on what is shared. What has values
that cannot be sent, as a mask of infinities, is refused by name, and so are elements that share their memory.

A buffer is read and written as it is found: some modules put another tensor in its place. A version is written over it,
also where learners carry, as nobody knows what of a buffer is progress. Two kinds training keeps for itself, and takes
over from versions only where it begins, and at its end:

- Statistics of layers such as BatchNorm. Training does not read them. And the pooled variance is that of all data only
  if each learner brings the statistics of its own: put into all of them, the mean of all would hide how far apart they
  are, and with H = 1 and a momentum of 0.1 nine tenths of that would be lost with every version.
- Counters that are ahead.
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

INTEGER_MAX = 2**24
"""float32 holds every integer up to this."""

_DTYPES: dict[torch.dtype, Dtype] = {getattr(torch, name): name for name in get_args(Dtype)}
_PACKED = (torch.int32, torch.int16, torch.int8, torch.uint8)
_SPECTRAL_NORM = "torch.nn.utils.parametrizations._SpectralNorm"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer of a module."""

    spec: TensorSpec
    owner: dict[str, Tensor | None]
    """`module._buffers`."""
    leaf: str
    is_statistic: bool
    """Of a layer that does not read it in training."""

    @property
    def tensor(self) -> Tensor:
        """As the module has it now. Raises ModelChanged if it has another shape than the one that joined."""
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
    """Those of one model, each once, by the smallest of its names."""

    shared: dict[str, Buffer] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Every further name of a shared one -> its name in `shared`."""

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """out <- values. `out`: float32 [num_elements]."""
        for piece, buffer in self._of(fragment):
            bounds = piece.tensor_bounds
            out[piece.bounds].copy_(layout.flat(buffer.tensor, bounds.start, bounds.stop))

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        """out <- 0 - values: a contribution holds what they are, as the difference to nothing."""
        self.read(fragment, out)
        out.neg_()

    def rounds(self, fragment: Fragment, values: torch.dtype) -> bool:
        """What they cannot hold is nothing that anybody would count as trained."""
        return False

    def blend(self, fragment: Fragment, values: Tensor, alpha: float) -> None:
        """They take over what they do in training: nobody knows what of a buffer is progress."""
        self.write(fragment, values, trains_on=True)

    def write(self, fragment: Fragment, values: Tensor, *, trains_on: bool = False) -> None:
        """buffers <- values, in place. Integers are whole again. `trains_on`: what training keeps for itself stays."""
        used_here(values)
        for piece, buffer in self._of(fragment):
            if trains_on and buffer.is_statistic:
                continue
            tensor, bounds = buffer.tensor, piece.tensor_bounds
            new = values[piece.bounds].to(tensor.device)
            if not tensor.is_floating_point():
                new = new.round()
            new = new.to(tensor.dtype)
            if trains_on and piece.rule == "most":  # in its own dtype: float32 would round a counter that is ahead
                new = torch.maximum(new, layout.flat(tensor, bounds.start, bounds.stop))
            layout.put(tensor, bounds.start, bounds.stop, new)

    def _of(self, fragment: Fragment) -> Iterator[tuple[Piece, Buffer]]:
        for piece in fragment.pieces:
            yield piece, self.shared[piece.tensor]


def buffers_of(model: nn.Module, private: Collection[str]) -> Buffers:
    """`private`: names of those that stay local. Reads all values once. Raises UnsupportedModel."""
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
    """Whether it is a kind of tensor whose elements float32 can stand for. Whatever its values are."""
    if buffer.dtype not in _DTYPES or buffer.layout is not torch.strided or buffer.is_meta or buffer.is_quantized:
        return False
    return not hasattr(buffer, "__tensor_flatten__")  # made of other tensors, or in parts on several ranks


def _unsendable(buffer: Tensor) -> str:
    """Why not, in words; empty: it can be sent."""
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
    """Whether it is a singular vector that spectral norm keeps, as either of torch's two implementations does."""
    if leaf[-2:] not in ("_u", "_v"):
        return False
    return _SPECTRAL_NORM in names.type_names(module) or f"{leaf[:-2]}_orig" in module._parameters
