"""Notices when the user's model is no longer the one that joined: parameters were replaced, overwritten, added,
removed, frozen or unfrozen.

A learner keeps the Parameters with which it joined. If others replace them, it would contribute dead ones, and versions
would never reach the model. Parameters that begin to train later would never be shared. If values are overwritten from
a file, the difference would count as training. So `Learner.step` checks this before it contributes. No values are read.

New storage of the same Parameter is fine (`parameter.data = tensor`, as SAM restores values) if it has the same form
and ties still hold, since the replica reads the Parameter itself.

Looking at a parameter costs 0.1 us, and 0.5 us with cold caches, so each step looks at `AT_ONCE` of them, in turn.
Until its turn comes, a replaced tensor contributes only what was trained before it was replaced. Writes such as
`parameter.data.copy_(...)` go unnoticed. For other values, use other_values.py.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import cycle
from typing import Any

from torch import Tensor, nn

from diloco_common.errors import ModelChanged, some
from diloco_worker.core import names
from diloco_worker.core.parameters import changed_form, form_of
from diloco_worker.core.shared_set import SharedSet

WHAT_TO_DO = (
    "Load checkpoints, move and convert the model before `join` (with state=, if the checkpoint is of this run); from "
    "then on leave its values to optimizer and learner"
)
NAME_THEM = (
    'name at `join` what will ever be trained, shared=["..."] or shared="all": from then on these may be frozen and '
    "unfrozen at any time"
)

_Hook = Callable[[nn.Module, Any], None]
AT_ONCE = 16
"""Parameters checked per step. With 500 parameters, each is checked every 32nd step."""


class ModelWatch:
    """The parameters of one model, as they were when it joined. Owned by the training thread."""

    def __init__(self, chosen: SharedSet, beside: Callable[[], None] | None = None) -> None:
        """`beside`: the check of the companions, which raises ModelChanged."""
        self._beside = beside
        self._chosen = chosen
        self._by_name = names.parameters(chosen.model)
        shared = {name for name, of in chosen.name_of.items() if of in chosen.shared}
        self._shared = {name: self._by_name[name] for name in self._by_name if name in shared}
        self._forms = {name: form_of(parameter) for name, parameter in self._shared.items()}
        self._names = list(self._shared)
        self._parameters = list(self._shared.values())
        self._addresses = _addresses(self._parameters)
        frozen = {name for name, of in chosen.name_of.items() if of in chosen.frozen}
        kept = frozen if chosen.is_named else shared | frozen
        self._kept = [(name, self._by_name[name]) for name in self._by_name if name in kept]
        self._grads = [parameter for _, parameter in self._kept]
        self._requires_grad = _requires_grad(self._grads)
        self._slots = _Slots(chosen.model)
        self._turns = range(-(-len(self._by_name) // AT_ONCE))
        self._next = cycle(self._turns)
        self._loaded = False
        self._hooks = [
            _LoadHooks(module, self._was_loaded)
            for module in _that_own(shared | chosen.buffers.shared.keys() | chosen.ties.keys(), chosen.model)
        ]

    def _was_loaded(self, module: nn.Module, incompatible_keys: object) -> None:
        self._loaded = True

    def check(self) -> None:
        """Called at every step. Raises ModelChanged."""
        if self._beside is not None:
            self._beside()
        self._check(next(self._next))
        if self._loaded:
            raise ModelChanged(
                f"load_state_dict has overwritten the model since it joined. {WHAT_TO_DO}. In the middle of a run, "
                "`with learner.values(checkpoint):` has other values in the model for a while, and "
                "learner.restore(checkpoint) trains on from them. This learner ends"
            )

    def check_in_place(self) -> None:
        """Check everything, except values. Raises ModelChanged."""
        if self._beside is not None:
            self._beside()
        for turn in self._turns:
            self._check(turn)

    def end(self) -> None:
        """Remove our hooks from the model. May be repeated."""
        for hooks in self._hooks:
            hooks.ours = None

    def _check(self, turn: int) -> None:
        """Runs in C unless something changed, since it is called at every step."""
        if not self._slots.are_as_they_were(turn, len(self._turns)):
            self._refuse_others()
            self._slots = _Slots(self._chosen.model)  # modules without parameters may come and go
        which = _share(self._grads, turn, len(self._turns))
        if _requires_grad(self._grads[which]) != self._requires_grad[which]:
            self._refuse_frozen_or_unfrozen()
        which = _share(self._parameters, turn, len(self._turns))
        if _addresses(self._parameters[which]) != self._addresses[which]:
            self._follow(which)

    def _refuse_others(self) -> None:
        """Raises ModelChanged unless the parameters are the very same objects."""
        found = names.parameters(self._chosen.model)
        if gone := [n for n, p in self._by_name.items() if n in self._shared and n in found and found[n] is not p]:
            raise ModelChanged(
                f"{some(gone)}: replaced by other tensors since the model joined, as by "
                f"load_state_dict(assign=True) or tie_weights(). {WHAT_TO_DO}. This learner ends"
            )
        added = [n for n, p in found.items() if self._by_name.get(n) is not p]
        removed = [n for n in self._by_name if n not in found]
        if added or removed:
            what = "; ".join(
                f"{some(which)}: {how} since the model joined"
                for which, how in ((added, "added"), (removed, "removed"))
                if which
            )
            raise ModelChanged(
                f"{what}. All learners share the parameters that a model had at `join`, so build all of them before, "
                f"and {NAME_THEM}. This learner ends"
            )

    def _refuse_frozen_or_unfrozen(self) -> None:
        changed = [
            (name, now.requires_grad)
            for (name, now), before in zip(self._kept, self._requires_grad, strict=True)
            if now.requires_grad != before
        ]
        unfrozen, frozen = [n for n, is_so in changed if is_so], [n for n, is_so in changed if not is_so]
        if not changed:
            return
        which = unfrozen or frozen
        how = "unfrozen since the model joined, and not shared" if unfrozen else "frozen since the model joined"
        raise ModelChanged(f"{some(which)}: {how}; {NAME_THEM}. This learner ends")

    def _follow(self, which: slice) -> None:
        """Accept new storage, unless it makes a different model. Raises ModelChanged."""
        for name in self._names[which]:
            if form_of(self._shared[name]) != self._forms[name]:
                raise changed_form(name, self._shared[name], *self._forms[name])
        for name in self._names[which]:
            objects = self._chosen.objects[self._chosen.name_of[name]]
            if len(objects) > 1 and len({names.identity(one) for one in objects}) > 1:
                raise ModelChanged(
                    f"{name} was tied to another parameter when the model joined, by sharing its memory, and no longer "
                    "is. Tie them as one Parameter object (head.weight = wte.weight). This learner ends"
                )
        self._addresses[which] = _addresses(self._parameters[which])


class _Slots:
    """The places of a model's parameters and submodules, and their contents."""

    def __init__(self, model: nn.Module) -> None:
        modules = {id(module): module for _, module in names.modules(model)}.values()
        owners: list[Mapping[str, Any]] = [d for m in modules for d in (m._parameters, m._modules)]
        self._dicts = owners
        self._sizes = list(map(len, owners))
        self._owners = [owner for owner in owners for _ in owner]
        self._leaves = [leaf for owner in owners for leaf in owner]
        self._things = [thing for owner in owners for thing in owner.values()]

    def are_as_they_were(self, turn: int, turns: int) -> bool:
        dicts, slots = _share(self._dicts, turn, turns), _share(self._things, turn, turns)
        if list(map(len, self._dicts[dicts])) != self._sizes[dicts]:
            return False
        found = map(operator.getitem, self._owners[slots], self._leaves[slots])
        try:
            return all(map(operator.is_, found, self._things[slots]))
        except KeyError:
            return False


def _that_own(tensors: Collection[str], model: nn.Module) -> Collection[nn.Module]:
    """The modules that own one of these: a loop may load others, such as a target network."""
    return {
        id(module): module
        for path, module in names.modules(model)
        if any(names.join(path, leaf) in tensors for leaf in (*module._parameters, *module._buffers))
    }.values()


class _LoadHooks(OrderedDict[int, _Hook]):
    """A module's `load_state_dict` hooks plus ours. Copies and pickles of the module do not contain ours, so that they
    need neither a learner nor this package. Hooks of submodules are called, too."""

    def __init__(self, module: nn.Module, ours: _Hook) -> None:
        super().__init__()
        self._before = module._load_state_dict_post_hooks  # handles to these remove them there
        self.ours: _Hook | None = ours
        module._load_state_dict_post_hooks = self

    def values(self) -> list[_Hook]:  # type: ignore[override]
        return [*self._before.values(), *super().values(), *([self.ours] if self.ours else [])]

    def __reduce__(self) -> Any:
        return OrderedDict([*self._before.items(), *self.items()]).__reduce__()


_requires_grad_of = operator.attrgetter("requires_grad")


def _requires_grad(parameters: Sequence[Tensor]) -> list[bool]:
    return list(map(_requires_grad_of, parameters))


def _addresses(parameters: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, parameters))


def _share(things: Sequence[object], turn: int, turns: int) -> slice:
    return slice(turn * len(things) // turns, (turn + 1) * len(things) // turns)
