"""The user's model as flat fragments: each kind of fragment, with the tensors of this process that hold it.

Under FSDP2 a rank holds rows of each tensor, looked up once when it joins. The modules switch between these and
gathered copies, and a forward pass without gradients leaves the copies in the root module, which would hide written
values. So modules are resharded before every write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from diloco_common.errors import UnsupportedModel
from diloco_common.wire.bounds import TENSORS_MAX, TIES_MAX
from diloco_common.wire.manifest import Fragment, Kind, TensorSpec, Tie
from diloco_worker.core import layout, momentum, names
from diloco_worker.core.buffers import Buffers
from diloco_worker.core.copies import Copied, FindCopies
from diloco_worker.core.momentum import Companion
from diloco_worker.core.parameters import Parameters
from diloco_worker.core.parts import ALONE, LocalFragment, Seat
from diloco_worker.core.shared_set import SharedSet, embeddings_and_heads
from diloco_worker.core.undone import VersionWatch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NONE: Mapping[str, Companion] = MappingProxyType({})


class Replica:
    """Everything that one learner shares of its model, and the companions."""

    def __init__(
        self, model: nn.Module | SharedSet, mean_merge: Collection[str] | None = None,
        companions: Mapping[str, Companion] = NONE, seat: Seat = ALONE,
    ) -> None:  # fmt: skip
        """`mean_merge`: names of parameters merged by plain mean; None: embeddings and the output head.

        `companions`: parameter name -> the optimizer state averaged with it.

        Raises UnsupportedModel if nothing is shared, or something cannot be synchronized.
        """
        chosen = model if isinstance(model, SharedSet) else SharedSet(model)
        parameters: Mapping[str, Tensor] = chosen.shared
        if not any(p.numel() for p in parameters.values()):
            raise UnsupportedModel(
                "the model has no trainable parameters; set requires_grad on those that should be trained"
            )
        for name, parameter in parameters.items():
            _check(name, parameter)
        averaged = _averaged(mean_merge, chosen)
        specs = {n: TensorSpec(n, tuple(p.shape), "mean" if n in averaged else "run") for n, p in parameters.items()}
        momenta, beside = momentum.declared(companions, parameters, specs)
        layout.refuse_several_devices(parameters)
        layout.refuse_overlaps(chosen.all, parameters)
        self.specs = [*specs.values(), *beside, *(buffer.spec for buffer in chosen.buffers.shared.values())]
        if len(self.specs) > TENSORS_MAX:
            raise UnsupportedModel(
                f"the model has {len(self.specs)} tensors that are shared, and a shard takes {TENSORS_MAX}: hold those "
                "of many experts or layers as one (torch.stack), freeze some, or keep some with each learner (private=)"
            )
        self._holding = seat.holding(parameters, self.specs)
        self._sharded = [m for _, m in names.modules(chosen.model) if hasattr(m, "reshard") and hasattr(m, "unshard")]
        self.of_kind: dict[Kind, Parameters | Buffers] = {"momentum": momenta, "buffer": chosen.buffers}
        """Kind -> the tensors of its fragments."""
        self.hold(self._holding.tensors)
        self.laid = VersionWatch(lambda name: self.parameters.theta(name))
        self.ties = tuple(Tie(key, of) for key, of in chosen.saved())[:TIES_MAX]
        """Where the model's state_dict differs from what is shared."""
        self.device = next(p.device for p in (*self._holding.tensors.values(), *parameters.values()) if p.numel())
        self.stow: Callable[[Tensor], Tensor] | None = None
        """Copies a residual to where it is kept between contributions. None: it stays where it was computed."""
        self.model = chosen.model
        self.has_copies = False
        """Whether versions also go into copies of the weights."""

    @property
    def is_spread(self) -> bool:
        return self._holding.is_spread

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors as this process's parameters from now on."""
        self.parameters = self.of_kind["parameter"] = Parameters(tensors)

    def keep_copies(self, find: FindCopies) -> None:
        """Write versions to these copies, too, from now on."""
        self.parameters = self.of_kind["parameter"] = Copied(self.parameters.tensors, find)
        self.has_copies = True

    def held(self, fragment: Fragment) -> LocalFragment:
        """The part of a fragment that this process holds, and pushes."""
        return self._holding.of(fragment)

    # ------------------------------------------------------------ values of a fragment, float32 [num_elements]

    def read(self, fragment: Fragment, out: Tensor) -> None:
        self.of_kind[fragment.kind].read(fragment, out)

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        """out <- anchor - theta, in the dtype of `out`."""
        self.of_kind[fragment.kind].progress(fragment, anchor, out)

    def rounds(self, fragment: Fragment, values: torch.dtype) -> bool:
        """Whether parameters of this fragment cannot hold all values of this dtype. May be called in any thread."""
        return self.of_kind[fragment.kind].rounds(fragment, values)

    def as_held(self, fragment: Fragment, values: Tensor) -> Tensor:
        """A copy of these values, rounded as the model holds them."""
        return self._addable(fragment).as_held(fragment, values)

    def write(self, fragment: Fragment, values: Tensor, *, trains_on: bool = False) -> None:
        """theta <- values. `trains_on`: keep what training owns."""
        self._reshard()
        self.of_kind[fragment.kind].write(fragment, values, trains_on=trains_on)

    def add(self, fragment: Fragment, difference: Tensor, steps: int = 0) -> None:
        """theta <- theta + difference. `steps`: inner steps by which it is late."""
        self._reshard()
        self._addable(fragment).add(fragment, difference, steps)

    def left(self, fragment: Fragment, difference: Tensor, steps: int) -> Tensor:
        """The part of a difference that `add` applies after `steps` inner steps."""
        return self._addable(fragment).left(fragment, difference, steps)

    def _addable(self, fragment: Fragment) -> Parameters:
        found = self.of_kind[fragment.kind]
        assert isinstance(found, Parameters), "versions of what is contributed whole are written"
        return found

    def _reshard(self) -> None:
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]

    # ------------------------------------------------------------ the whole model

    def keep(self, also: Sequence[Tensor] = ()) -> Callable[[], None]:
        """Copy the shared parameters, all buffers and `also`; the returned function restores them, bit for bit."""
        parameters = [(tensor, self.parameters.theta(name)) for name, tensor in self.parameters.tensors.items()]
        owners = [
            (module._buffers, leaf, buffer)
            for _, module in names.modules(self.model)
            for leaf, buffer in module._buffers.items()
            if buffer is not None
        ]
        tensors = (
            *(theta for _, theta in parameters),
            *(copy for _, copy in self.parameters.copies()),
            *also,
            *(buffer for *_, buffer in owners),
        )
        unique = {names.identity(t): layout.once_each(t.detach(), t) for t in tensors}
        copies = [(tensor, tensor.clone()) for tensor in unique.values()]

        def put_back() -> None:
            self._reshard()
            for parameter, theta in parameters:
                if parameter.data_ptr() != theta.data_ptr():
                    parameter.data = theta
            for tensor, copy in copies:
                tensor.copy_(copy)
            for owner, leaf, buffer in owners:
                owner[leaf] = buffer  # some modules replace theirs

        return put_back

    @torch.no_grad()
    def into_copies(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write values to the copies of each of our parameters; they were already written to theta."""
        values = {theta.data_ptr(): value for theta, value in pairs}
        for name, copy in self.parameters.copies():
            if (value := values.get(self.parameters.theta(name).data_ptr())) is not None:
                copy.copy_(value)


def _averaged(mean_merge: Collection[str] | None, chosen: SharedSet) -> set[str]:
    """Names of parameters merged by plain mean. Any name of a tied one is accepted. Raises UnsupportedModel."""
    if mean_merge is None:
        ids = embeddings_and_heads(chosen.model)
        return {name for name in chosen.shared if any(id(parameter) in ids for parameter in chosen.objects[name])}
    unknown = sorted(name for name in mean_merge if chosen.name_of.get(name) not in chosen.shared)
    if unknown:
        raise UnsupportedModel(f"mean_merge names {unknown[:3]}, which are not trainable parameters of the model")
    return {chosen.name_of[name] for name in mean_merge}


def _check(name: str, parameter: Tensor) -> None:
    if parameter.is_inference():
        raise UnsupportedModel(
            f"{name} was made under torch.inference_mode(), so nothing can be written to it: make or load the model "
            "outside of that"
        )
    if parameter.dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{name} is {parameter.dtype}; trainable parameters must be float32, bfloat16 or float16"
        )
    if parameter.is_meta:
        raise UnsupportedModel(f"{name} is on the meta device; materialize the model before joining")
    if layout.overlaps_itself(parameter):
        raise UnsupportedModel(
            f"{name} has elements that share memory, as after expand: make a tensor of its own before joining, by "
            ".contiguous() for example"
        )
