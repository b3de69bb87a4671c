"""The user's model, seen as flat fragments.

Moves values between the shared parameters (shared_set.py) and flat float32 tensors laid out by the manifest, whatever
the layout of a parameter (layout.py). A parameter is looked at anew each time: its storage may be another one since
(`parameter.data = tensor`, as SAM does). Companions, which an optimizer keeps for parameters and changes in place, are
read and written as parameters are. Of buffers (buffers.py) a contribution holds what they are, as the difference to
nothing, and a version is written over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from diloco_common.bounds import TIES_MAX
from diloco_common.codec.base import as_held, progress_since, rounds
from diloco_common.errors import ModelChanged, UnsupportedModel
from diloco_common.manifest import Fragment, Momentum, Piece, TensorSpec, companion_of, momentum_of
from diloco_common.messages import Tie
from diloco_worker.core import layout, names
from diloco_worker.core.copies import Copies, FindCopies
from diloco_worker.core.heads import embeddings_and_heads
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.core.undone import Laid

MOST_OF_OWN = 3.0
"""How many times its own norm a version may make momentum that is divided by no second moment. The mean of such momenta
is no longer than the longest. And 24 inner steps keep 0.29 of it at mu = 0.95: so lies in version after version do not
grow."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Pace(NamedTuple):
    """How an optimizer treats a companion at present."""

    keeps: float = 1.0
    """What an inner step keeps of the values: beta1 of AdamW, mu of Muon."""
    most: float = math.inf
    """How many times the root of the second moment the optimizer's own gradients could make the values, at most."""


class Companion(NamedTuple):
    """What an optimizer keeps for a parameter and changes in place. Tensors are float32, of the parameter's shape."""

    kind: Momentum
    values: Tensor
    second: Tensor | None = None
    """A second moment, which stays local, and by whose root the optimizer divides; None: it divides by none."""
    pace: Callable[[], Pace] = Pace
    """Asked where a version is applied: schedules move betas."""


NONE: Mapping[str, Companion] = MappingProxyType({})


class Replica:
    """The shared parameters of one model by plain name, and their companions."""

    def __init__(
        self, model: nn.Module | SharedSet, mean_merge: Collection[str] | None = None,
        companions: Mapping[str, Companion] = NONE,
    ) -> None:  # fmt: skip
        """`mean_merge` names the parameters merged by plain mean; None means embeddings and the output head.

        `companions`: name of a parameter -> what its optimizer keeps for it.

        Raises UnsupportedModel if nothing is shared, or a parameter or companion cannot be synchronised.
        """
        chosen = model if isinstance(model, SharedSet) else SharedSet(model)
        parameters = chosen.shared
        if not any(p.numel() for p in parameters.values()):
            raise UnsupportedModel(
                "the model has no trainable parameters; set requires_grad on those that should be trained"
            )
        for name, parameter in parameters.items():
            _check(name, parameter)
        averaged = _embeddings_and_heads(chosen) if mean_merge is None else _shared_names(mean_merge, chosen)
        for name, companion in companions.items():
            _check_companion(name, companion, parameters)
        layout.refuse_several_devices(parameters)
        layout.refuse_overlaps(chosen.all, parameters)
        self._companions = {momentum_of(name, of.kind): of for name, of in companions.items()}
        self._hold({**parameters, **{name: companion.values for name, companion in self._companions.items()}})
        self.specs = [
            TensorSpec(name, tuple(p.shape), "mean" if name in averaged else "run") for name, p in parameters.items()
        ]
        self.specs += [companion_of(s, companions[s.name].kind) for s in self.specs if s.name in companions]
        self._buffers = chosen.buffers
        self.specs += [buffer.spec for buffer in self._buffers.shared.values()]
        self.laid = Laid(self._theta, lambda name: self._tensors[name].data_ptr())
        """Whether versions stay in the model."""
        self.ties = tuple(Tie(name, of) for name, of in chosen.ties.items())[:TIES_MAX]
        """The further names of those that are tied."""
        self.device = next(p.device for p in parameters.values() if p.numel())
        self.copies: Copies | None = None
        """Those that the optimizer steps on; None: it steps on the parameters."""
        self.stow: Callable[[Tensor], Tensor] | None = None
        """Where a residual lies between contributions: gives a copy there. None: where it was computed."""
        self.model = chosen.model
        """As it joined."""
        self.reads_later = False
        """Whether the codec thread takes snapshots, after the step boundary."""

    @property
    def is_spread(self) -> bool:
        """Whether other processes hold parts of the parameters."""
        return False

    def views(self, fragment: Fragment) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece of a fragment with the part of the model that it names, in place: flat, where that is contiguous;
        else the piece is cut into parts that are views."""
        for piece in fragment.pieces:
            theta = self._theta(piece.tensor)
            if theta.is_contiguous():
                yield piece, theta.view(-1)[piece.tensor_bounds]
                continue
            begins = piece.offset - piece.tensor_offset
            for first, part in layout.parts(theta, piece.tensor_offset, piece.tensor_offset + piece.num_elements):
                yield Piece(piece.tensor, first, part.numel(), begins + first, piece.rule), part

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        """From now on these hold the values of this process."""
        self._tensors = dict(tensors)
        self._forms = {name: form_of(tensor) for name, tensor in tensors.items()}

    def _theta(self, name: str) -> Tensor:
        """As it is now. Raises ModelChanged."""
        theta = self._tensors[name].detach()
        if form_of(theta) != self._forms[name]:
            raise changed_form(name, theta, *self._forms[name])
        return theta

    def held(self, fragment: Fragment) -> Fragment:
        """What of a fragment this process holds: all of it."""
        return fragment

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """out <- theta, in float32. `out`: [num_elements] on the model's device."""
        if fragment.kind == "buffer":
            self._buffers.read(fragment, out)
            return
        if (copies := self._copies(fragment)) is not None:
            copies.read(fragment, out)
            return
        for piece, theta in self.views(fragment):
            _like(theta, out[piece.bounds]).copy_(theta)

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        """out <- anchor - theta, in the dtype of `out`; of buffers, 0 - theta. Both: [num_elements] on the model's
        device. The anchor counts as theta holds it: what was rounded away is nothing that was trained."""
        if fragment.kind == "buffer":
            self._buffers.read(fragment, out)
            out.neg_()
            return
        _used_here(anchor)
        if (copies := self._copies(fragment)) is not None:
            copies.progress(fragment, anchor, out)
            return
        flat: list[tuple[int, Tensor]] = []
        for piece, theta in self.views(fragment):
            if theta.dim() == 1 and theta.is_contiguous():
                flat.append((piece.offset, theta))
            else:
                into, since = out[piece.bounds], anchor[piece.bounds]
                torch.sub(_like(theta, as_held(since, theta.dtype)), theta, out=_like(theta, into))
        progress_since(anchor, flat, out)

    def rounds(self, fragment: Fragment, values: torch.dtype) -> bool:
        """Whether parameters of this fragment cannot hold all values of this dtype. In any thread."""
        return fragment.kind != "buffer" and any(rounds(self._dtype(p), values) for p in fragment.pieces)

    def as_held(self, fragment: Fragment, values: Tensor) -> Tensor:
        """A copy of these values, as the model holds them: rounded, where no master holds them whole. Float32."""
        held = values.to(torch.float32, copy=True)
        copies = self._copies(fragment)
        for piece in fragment.pieces:
            if copies is None or copies.master(piece.tensor) is None:
                held[piece.bounds] = as_held(values[piece.bounds], self._dtype(piece))
        return held

    def _dtype(self, piece: Piece) -> torch.dtype:
        return self._forms[piece.tensor][1]

    def write(self, fragment: Fragment, values: Tensor, *, trains_on: bool = False) -> None:
        """theta <- values, rounded to the dtype of each tensor. `trains_on`: what training keeps of buffers for
        itself stays."""
        _used_here(values)
        if fragment.kind == "buffer":
            self._buffers.write(fragment, values, trains_on=trains_on)
            return
        if (copies := self._copies(fragment)) is not None:
            copies.write(fragment, values)
            return
        with self._bounded(fragment):
            for theta, new in self._beside(fragment, values):
                theta.copy_(new)

    def add(self, fragment: Fragment, difference: Tensor, steps: int = 0) -> None:
        """theta <- theta + difference, computed in float32.

        `steps`: so many inner steps ago it would have been due. A companion keeps of it what it keeps of what it was
        then: it has forgotten the rest.
        """
        _used_here(difference)
        if (copies := self._copies(fragment)) is not None:
            copies.add(fragment, difference)
            return
        with self._bounded(fragment):
            for piece, theta in self.views(fragment):
                kept = self._companions[piece.tensor].pace().keeps ** steps if fragment.kind == "momentum" else 1.0
                theta.add_(_like(theta, difference[piece.bounds]), alpha=kept)

    def keep(self, also: Sequence[Tensor] = ()) -> Callable[[], None]:
        """Copies of the shared parameters, of all buffers, and of these; the call puts them back, bit for bit."""
        parameters = [(self._tensors[name], self._theta(name)) for name in self._tensors.keys() - self._companions]
        owners = [
            (module._buffers, leaf, buffer)
            for _, module in names.modules(self.model)
            for leaf, buffer in module._buffers.items()
            if buffer is not None
        ]
        tensors = (
            *(theta for _, theta in parameters),
            *(copy for _, copy in self._all_copies()),
            *also,
            *(buffer for *_, buffer in owners),
        )
        unique = {names.identity(t): layout.once_each(t.detach(), t) for t in tensors}
        copies = [(tensor, tensor.clone()) for tensor in unique.values()]

        def put_back() -> None:
            for parameter, theta in parameters:
                if parameter.data_ptr() != theta.data_ptr():
                    parameter.data = theta
            for tensor, copy in copies:
                tensor.copy_(copy)
            for owner, leaf, buffer in owners:
                owner[leaf] = buffer  # some modules replace theirs

        return put_back

    def keep_copies(self, find: FindCopies) -> None:
        """From now on versions go there, too."""
        self.copies = Copies(find, self._theta)

    @torch.no_grad()
    def into_copies(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The copies of each theta that is one of ours <- values: these were written to theta."""
        if self.copies is not None:
            values = {theta.data_ptr(): value for theta, value in pairs}
            for name, copy in self._all_copies():
                if (value := values.get(self._theta(name).data_ptr())) is not None:
                    copy.copy_(value)

    def _copies(self, fragment: Fragment) -> Copies | None:
        return self.copies if fragment.traits.is_of_model else None

    def _all_copies(self) -> list[tuple[str, Tensor]]:
        """Each with the name of its parameter."""
        parameters = self._tensors.keys() - self._companions
        return [] if self.copies is None else [(name, copy) for name in parameters for copy in self.copies.of(name)]

    def left(self, fragment: Fragment, difference: Tensor, steps: int) -> Tensor:
        """Of a difference, as `add` counts it after so many inner steps: float32 [num_elements]."""
        if fragment.kind != "momentum":
            return difference
        left = torch.empty_like(difference)
        for piece in fragment.pieces:
            kept = self._companions[piece.tensor].pace().keeps ** steps
            torch.mul(difference[piece.bounds], kept, out=left[piece.bounds])
        return left

    def blend(self, fragment: Fragment, values: Tensor, alpha: float) -> None:
        """theta <- alpha * theta + (1 - alpha) * values, computed in float32."""
        _used_here(values)
        if (copies := self._copies(fragment)) is not None:
            copies.blend(fragment, values, alpha)
            return
        with self._bounded(fragment):
            for theta, new in self._beside(fragment, values):
                if theta.dtype == torch.float32:
                    theta.lerp_(new.float(), 1 - alpha)
                else:
                    theta.copy_(theta.float().lerp_(new.float(), 1 - alpha))

    @contextmanager
    def _bounded(self, fragment: Fragment) -> Iterator[None]:
        """Cut what others put into a companion meanwhile to what this learner can bear.

        Where this learner has met no gradient yet (a row of an embedding), the second moment is zero, and the optimizer
        would divide the momentum of others by its eps. Without a second moment, a single liar could make the momentum
        so long that it is forgotten only after hundreds of steps: so it is scaled. Zeros take over everything.
        """
        if fragment.kind != "momentum":
            yield
            return
        found = [(self._companions[piece.tensor], piece, values) for piece, values in self.views(fragment)]
        own = [torch.linalg.vector_norm(values) if c.second is None else None for c, _, values in found]
        yield
        for (companion, piece, values), norm in zip(found, own, strict=True):
            if companion.second is not None:
                start = piece.tensor_offset
                ((_, second),) = layout.parts(companion.second, start, start + piece.num_elements)
                most = second.sqrt().mul_(companion.pace().most)
                torch.clamp(values, -most, most, out=values)
            elif norm is not None:
                share = (MOST_OF_OWN * norm / torch.linalg.vector_norm(values)).clamp_(max=1.0)
                values.mul_(torch.where(norm > 0, share, 1.0)).nan_to_num_(0.0, 0.0, 0.0)

    def _beside(self, fragment: Fragment, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The parts of theta, each with its values."""
        for piece, theta in self.views(fragment):
            yield theta, _like(theta, values[piece.bounds])


def wait_for_device(device: torch.device) -> None:
    """Until what this thread has computed there is there for every thread and stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def in_pinned_memory(values: Tensor) -> Tensor:
    """A copy in pages of the host that stay in memory, from where a device reads fastest. Waits until it is there."""
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)


def queued_until(values: Tensor) -> Callable[[], None] | None:
    """A call that waits until the work queued so far is in `values`; None: it is there already."""
    if not values.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    return event.synchronize


def _used_here(*values: Tensor) -> None:
    """Another thread has allocated them, perhaps for another stream: keep the memory until this one is done with it."""
    for part in values:
        if part.is_cuda:
            part.record_stream(torch.cuda.current_stream(part.device))


def _embeddings_and_heads(chosen: SharedSet) -> set[str]:
    ids = embeddings_and_heads(chosen.model)
    return {name for name in chosen.shared if any(id(parameter) in ids for parameter in chosen.objects[name])}


def _shared_names(mean_merge: Collection[str], chosen: SharedSet) -> set[str]:
    """Any name of a tied parameter will do. Raises UnsupportedModel."""
    unknown = sorted(name for name in mean_merge if chosen.name_of.get(name) not in chosen.shared)
    if unknown:
        raise UnsupportedModel(f"mean_merge names {unknown[:3]}, which are not trainable parameters of the model")
    return {chosen.name_of[name] for name in mean_merge}


def _check(name: str, parameter: Tensor) -> None:
    if parameter.dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{name} is {parameter.dtype}; trainable parameters must be float32, bfloat16 or float16"
        )
    if parameter.is_meta:
        raise UnsupportedModel(f"{name} is on the meta device; materialise the model before joining")
    if layout.overlaps_itself(parameter):
        raise UnsupportedModel(
            f"{name} has elements that share memory, as after expand: make a tensor of its own before joining, by "
            ".contiguous() for example"
        )


def form_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def changed_form(
    name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> ModelChanged:
    """The error of a parameter that was of another form when it joined."""
    return ModelChanged(
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and when the model joined it was {dtype} "
        f"{tuple(shape)} on {device}: move and convert the model before `join`. This learner ends"
    )


def _like(theta: Tensor, values: Tensor) -> Tensor:
    """Flat values in the shape of a part of the model."""
    return values if theta.dim() == 1 else values.view(theta.shape)


def _check_companion(name: str, companion: Companion, parameters: Mapping[str, Tensor]) -> None:
    what, values = momentum_of(name, companion.kind), companion.values
    if what in parameters:
        raise UnsupportedModel(f"the model has a parameter that is called {what!r}, as its averaged momentum would be")
    if values.dtype != torch.float32:
        raise UnsupportedModel(
            f"the {what} is {values.dtype}; only float32 is averaged: keep the parameter in float32, or leave the "
            "momentum local (without companions=)"
        )
    second = values if companion.second is None else companion.second
    if values.shape != parameters[name].shape or layout.overlaps_itself(values) or second.stride() != values.stride():
        raise UnsupportedModel(f"the {what} is laid out in another way than {name}, so it cannot be averaged")
