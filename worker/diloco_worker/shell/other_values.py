"""Puts other values (global ones or the user's own) into the model for a while, to evaluate, sample and save.

They are written in place. At the end of the block the shared parameters, all buffers and any other tensors written are
restored, bit for bit. So the block may run the model in train mode, for example to recompute statistics. Meanwhile no
version is applied and nothing is contributed; arriving events wait in the inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from diloco_common.errors import UnsupportedModel, WrongCall, did_you_mean, shown
from diloco_worker.core import layout, names
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import as_module

Values: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[str, Tensor] | Mapping[str, nn.Module]
"""Names and tensors as in a state_dict, or a model as `join` accepts it."""

_WRAPPED = frozenset(names.WRAPPERS.values())
_COUNTER = "n_averaged"
"""A buffer that torch's AveragedModel has in addition to the averaged model's."""


class OtherValues:
    """One block at a time. Owned by the training thread."""

    def __init__(self, replica: Replica, check_model: Callable[[], None]) -> None:
        """`check_model` raises ModelChanged."""
        self._replica = replica
        self._check_model = check_model
        self._block = ""

    def check(self) -> None:
        """Raises WrongCall inside a block."""
        if self._block:
            raise WrongCall(
                f"inside `with learner.{self._block}` the model holds other values: end the block before the next "
                "step, poll, finish, leave, restore or block"
            )

    @contextmanager
    def instead(self, block: str, write: Callable[[], None], also: Sequence[Tensor] = ()) -> Iterator[None]:
        """Run a block of that name. `write` writes the values; `also`: other tensors that it changes."""
        self.check()
        self._check_model()
        with torch.no_grad():
            put_back = self._replica.keep(also)
        self._block = block
        try:
            with torch.no_grad():
                write()
            yield
        finally:
            self._block = ""
            with torch.no_grad():
                put_back()

    @torch.no_grad()
    def for_good(self, values: Values) -> None:
        """Write values that stay. Raises WrongCall and UnsupportedModel."""
        self.check()
        self._check_model()
        pairs = self.beside(values)
        write(pairs)
        self._replica.into_copies(pairs)

    def beside(self, values: Values) -> list[tuple[Tensor, Tensor]]:
        """Each model tensor that the values name, with its new value. Raises WrongCall and UnsupportedModel."""
        if self._replica.is_spread:
            raise UnsupportedModel("values of your own cannot be put into a model of fully_shard yet")
        return beside(self._replica.model, values)


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for theta, values in pairs:
        layout.once_each(theta, theta).copy_(layout.once_each(values, theta))


def beside(model: nn.Module, values: Values) -> list[tuple[Tensor, Tensor]]:
    """Each named model tensor with its new value; wrappers on either side do not matter. Raises WrongCall."""
    known: dict[str, Tensor] = {**names.buffers(model), **names.parameters(model)}
    plain = {_plain(name): tensor for name, tensor in known.items()}
    found: list[tuple[Tensor, Tensor]] = []
    for name, value in _by_name(values).items():
        theta = known.get(name, plain.get(_plain(name)))
        if theta is None and name.rpartition(".")[2] == _COUNTER:
            continue
        if theta is None:
            raise WrongCall(f"values: the model has no {name}{did_you_mean(name, known)}")
        if not isinstance(value, Tensor) or value.shape != theta.shape:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise WrongCall(f"values: {name} is {what}, and in the model a tensor of shape {tuple(theta.shape)}")
        found.append((theta.detach(), value.detach()))
    if not found:
        raise WrongCall("values: there are none; give the result of the model's state_dict(), or a module")
    return found


def _by_name(values: Values) -> Mapping[str, object]:
    if isinstance(values, Mapping) and not any(isinstance(value, nn.Module) for value in values.values()):
        return values
    module = as_module(values)
    return {**names.buffers(module), **names.parameters(module)}


def _plain(name: str) -> str:
    """The name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)
