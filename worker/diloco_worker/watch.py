"""Notices when the user's model is no longer the one that joined: its parameters were replaced, or overwritten.

A learner holds on to the tensors that it joined with. Where others are put in their place, it would go on contributing
dead ones, and versions would never reach the model. Where their values are overwritten from a file, the difference
would be taken for training. So `Learner.step` asks here, before anything of it is contributed. Nothing reads values.
Looking at a parameter still costs 0.1 us, and 0.5 us where caches are cold, so a step looks at `AT_ONCE` of them, in
turn: what a contribution takes from a replaced tensor until its turn has come was trained before it was replaced.
Nobody notices `parameter.data.copy_(...)`. Other values go through other_values.py, which writes in place.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import cycle

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diloco_common.errors import ModelChanged
from diloco_worker.companions import Companions
from diloco_worker.core import names
from diloco_worker.core.shared_set import SharedSet

WHAT_TO_DO = (
    "Load checkpoints, move and convert the model before `join` (with state=, if the checkpoint is of this run); from "
    "then on leave its values to optimizer and learner"
)

AT_ONCE = 128
"""Parameters that a step looks at. With 500, that is each of them every fourth step."""


class ModelWatch:
    """The shared parameters of one model, as they were when it joined. Owned by the training thread."""

    def __init__(self, chosen: SharedSet, companions: Companions | None = None) -> None:
        """`companions`: what is averaged beside it."""
        self._companions = companions
        found = [
            (names.join(path, leaf), module._parameters, leaf, parameter)
            for path, module in names.modules(chosen.model)
            for leaf, parameter in module._parameters.items()
            if parameter is not None and chosen.name_of[names.join(path, leaf)] in chosen.shared
        ]
        self._names = [name for name, *_ in found]
        self._owners = [owner for _, owner, _, _ in found]
        self._leaves = [leaf for *_, leaf, _ in found]
        self._parameters = [parameter for *_, parameter in found]
        self._addresses = _addresses(self._parameters)
        self._turns = cycle(slice(start, start + AT_ONCE) for start in range(0, len(found), AT_ONCE))
        self._loaded = _Loaded()
        modules = {id(module): module for _, module in names.modules(chosen.model)}
        self._handles: list[RemovableHandle] = [
            module.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]
            for module in modules.values()
        ]

    def check(self) -> None:
        """At every step. Raises ModelChanged."""
        if self._companions is not None:
            self._companions.check()
        if not self._are_in_place(next(self._turns)):
            self.check_in_place()
        if self._loaded.happened:
            raise ModelChanged(
                f"load_state_dict has overwritten the model since it joined. {WHAT_TO_DO}. In the middle of a run, "
                "`with learner.values(checkpoint):` has other values in the model for a while, and "
                "learner.restore(checkpoint) trains on from them. This learner ends"
            )

    def check_in_place(self) -> None:
        """Whether parameters and companions are the tensors that they were, whatever their values. Raises
        ModelChanged."""
        if self._companions is not None:
            self._companions.check()
        if self._are_in_place(slice(None)):
            return
        replaced = [
            name
            for name, owner, leaf, parameter, address in zip(
                self._names, self._owners, self._leaves, self._parameters, self._addresses, strict=True
            )
            if owner.get(leaf) is not parameter or parameter.data_ptr() != address
        ]
        more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        raise ModelChanged(
            f"{', '.join(replaced[:3])}{more}: replaced by other tensors since the model joined, as by "
            f"load_state_dict(assign=True), model.to(...) or tie_weights(). {WHAT_TO_DO}. This learner ends"
        )

    def _are_in_place(self, which: slice) -> bool:
        parameters = self._parameters[which]
        found = map(operator.getitem, self._owners[which], self._leaves[which])  # in C: this runs at every step
        try:
            return all(map(operator.is_, found, parameters)) and _addresses(parameters) == self._addresses[which]
        except KeyError:
            return False

    def end(self) -> None:
        """Leave nothing in the model. Repeating it is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Loaded:
    """A hook of `load_state_dict`. It is inside the user's modules, so copies of them, and pickles, get a new one."""

    def __init__(self) -> None:
        self.happened = False

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        self.happened = True

    def __reduce__(self) -> tuple[type[_Loaded], tuple[()]]:
        return _Loaded, ()


def _addresses(parameters: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, parameters))
