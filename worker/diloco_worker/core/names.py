"""The user's own names of modules and tensors, without the names that wrappers add.

A wrapper is recognized by its type, and the name under which it keeps the wrapped module is left out. A submodule that
the user calls `module` keeps its name. A tied tensor has several names; it counts once, under the smallest of them, so
its name does not depend on the order in which the user defined the submodules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from diloco_common.errors import UnsupportedModel

WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",  # torch.compile
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
}
"""Type of a wrapper, as a string since importing takes seconds and may fail -> its name for the wrapped module."""

T = TypeVar("T", bound=Tensor)


def type_names(thing: object) -> Iterator[str]:
    """The dotted names of its type and all base types."""
    for kind in type(thing).__mro__:
        yield f"{kind.__module__}.{kind.__qualname__}"


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path, "" for the model. A module used in several places appears several times."""
    return _modules(model, "", ())


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name; a tied one has several. Raises UnsupportedModel if two have the same name."""
    return _by_name((path, module._parameters) for path, module in modules(model))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers by name, as `parameters`."""
    return _by_name((path, module._buffers) for path, module in modules(model))


def saved(model: nn.Module) -> dict[str, object]:
    """The model's own `state_dict`, with extra state, under the names of `modules`."""
    try:
        state = dict(model.state_dict())
    except Exception:  # a user's method may raise anything: then only names are known
        return {}
    wrapped = [f"{join(path, inside)}." for path, module in model.named_modules() if (inside := _inside(module))]
    return {_without(wrapped, key): value for key, value in state.items() if isinstance(key, str)}


def canonical(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every name -> the smallest name of its tensor; sorted by name."""
    smallest: dict[object, str] = {}
    return {name: smallest.setdefault(identity(tensors[name]), name) for name in sorted(tensors)}


def once(tensors: Mapping[str, T]) -> dict[str, T]:
    """Each tensor once, under the smallest of its names; sorted by name."""
    return {name: tensors[name] for name, of in canonical(tensors).items() if name == of}


def identity(tensor: Tensor) -> object:
    """Equal for tensors that are one: the same object, or the same elements of the same memory."""
    if not has_memory(tensor):
        return id(tensor)
    strides = tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)  # others are arbitrary
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, strides


def has_memory(tensor: Tensor) -> bool:
    """Whether it has elements, in its own plain memory."""
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout is not torch.strided or tensor.is_meta:
        return False  # a tensor subclass, or without memory
    return tensor.numel() > 0 and not tensor.is_quantized


def join(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf


def _inside(module: nn.Module) -> str | None:
    return next((WRAPPERS[name] for name in type_names(module) if name in WRAPPERS), None)


class _Scripted(nn.Module):
    """Stands for a TorchScript module without parameters, as libraries such as e3nn generate them, and has its buffers:
    TorchScript keeps them differently."""

    def __init__(self, script: nn.Module) -> None:
        super().__init__()
        for leaf, buffer in script._buffers.items():
            self.register_buffer(leaf, buffer)
        for name, child in script._modules.items():
            self.add_module(name, child)


def is_scripted(module: nn.Module) -> bool:
    return "torch.jit._script.ScriptModule" in type_names(module)


def _modules(module: nn.Module, path: str, above: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    if is_scripted(module) and next(module.parameters(), None) is None:
        module = _Scripted(module)
    yield path, module
    inside = _inside(module)
    for name, child in module._modules.items():
        if child is not None and child not in above:  # some keep their parent as a submodule
            yield from _modules(child, path if name == inside else join(path, name), (*above, module))


def _without(wrapped: Iterable[str], key: str) -> str:
    for path in sorted((path for path in wrapped if key.startswith(path)), key=len, reverse=True):
        key = path[: path.rfind(".", 0, -1) + 1] + key.removeprefix(path)
    return key


def _by_name(owners: Iterable[tuple[str, Mapping[str, T | None]]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for path, tensors in owners:
        for leaf, tensor in tensors.items():
            if tensor is not None and found.setdefault(name := join(path, leaf), tensor) is not tensor:
                raise UnsupportedModel(
                    f"two tensors are called {name} once the names of wrappers ({', '.join(WRAPPERS.values())}) are "
                    "removed; rename the one that is registered on the wrapper itself"
                )
    return found
