"""The user's model, seen as flat fragments.

Knows which parameters are synchronised (the trainable ones, under their names without wrapper prefixes), and moves
values between them and flat float32 tensors laid out by the manifest. Buffers (BatchNorm statistics, for example) stay
local. Tied parameters count once, under the first of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from diloco_common.errors import UnsupportedModel
from diloco_common.manifest import Fragment, Piece, TensorSpec

_WRAPPERS = ("_orig_mod", "module")
"""What torch.compile and DistributedDataParallel call the model that they wrap."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Replica:
    """The trainable parameters of one model, by plain name."""

    def __init__(self, model: nn.Module, mean_merge: Collection[str] | None = None) -> None:
        """`mean_merge` names the parameters merged by plain mean; None means embeddings and the output head.

        Raises UnsupportedModel if nothing is trainable, or a parameter cannot be synchronised.
        """
        parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameters.setdefault(plain_name(name), parameter) is not parameter:
                raise UnsupportedModel(
                    f"two parameters are called {plain_name(name)} once the names of wrappers "
                    f"({', '.join(_WRAPPERS)}) are taken off; rename the submodule that has such a name"
                )
        if not any(p.numel() for p in parameters.values()):
            raise UnsupportedModel(
                "the model has no trainable parameters; set requires_grad on those that should be trained"
            )
        for name, parameter in parameters.items():
            _check(name, parameter)
        averaged = _embeddings_and_heads(model) if mean_merge is None else set(mean_merge)
        unknown = sorted(averaged - parameters.keys()) if mean_merge is not None else []
        if unknown:
            raise UnsupportedModel(f"mean_merge names {unknown[:3]}, which are not trainable parameters of the model")
        self._parameters: dict[str, Tensor] = {name: p.detach() for name, p in parameters.items()}
        self.specs = [TensorSpec(name, tuple(p.shape), name in averaged) for name, p in parameters.items()]
        self.device = next(p.device for p in parameters.values() if p.numel())

    def views(self, fragment: Fragment) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece of a fragment with the flat part of the model that it names, in place."""
        for piece in fragment.pieces:
            flat = self._parameters[piece.tensor].view(-1)
            yield piece, flat[piece.tensor_offset : piece.tensor_offset + piece.num_elements]

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """out <- theta, in float32. `out`: [num_elements] on the model's device."""
        for piece, theta in self.views(fragment):
            out[piece.offset : piece.offset + piece.num_elements].copy_(theta)

    def write(self, fragment: Fragment, values: Tensor) -> None:
        """theta <- values, rounded to the parameter's dtype."""
        _used_here(values)
        for piece, theta in self.views(fragment):
            theta.copy_(values[piece.offset : piece.offset + piece.num_elements])

    def add(self, fragment: Fragment, difference: Tensor) -> None:
        """theta <- theta + difference, computed in float32."""
        _used_here(difference)
        for piece, theta in self.views(fragment):
            theta.add_(difference[piece.offset : piece.offset + piece.num_elements])

    def blend(self, fragment: Fragment, new: Tensor, alpha: float) -> None:
        """theta <- alpha * theta + (1 - alpha) * new, computed in float32."""
        _used_here(new)
        for piece, theta in self.views(fragment):
            part = new[piece.offset : piece.offset + piece.num_elements]
            if theta.dtype == torch.float32:
                theta.lerp_(part, 1 - alpha)
            else:
                theta.copy_(theta.float().lerp_(part, 1 - alpha))


def wait_for_device(values: Tensor) -> None:
    """Until what was put into `values` is there, for every thread and stream."""
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()


def queued_until(values: Tensor) -> Callable[[], None] | None:
    """A call that waits until the work queued so far is in `values`; None: it is there already."""
    if not values.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    return event.synchronize


def _used_here(values: Tensor) -> None:
    """Another thread has allocated them, perhaps for another stream: keep the memory until this one is done with it."""
    if values.is_cuda:
        values.record_stream(torch.cuda.current_stream(values.device))


def plain_name(name: str) -> str:
    """The user's own name of a parameter, whatever wraps the model or parts of it."""
    *modules, leaf = name.split(".")
    return ".".join([*(m for m in modules if m not in _WRAPPERS), leaf])


def _check(name: str, parameter: Tensor) -> None:
    if type(parameter).__name__ == "DTensor" or hasattr(parameter, "full_tensor"):
        raise UnsupportedModel(f"{name} is a DTensor; sharded models (FSDP2) are not supported yet")
    if parameter.dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{name} is {parameter.dtype}; trainable parameters must be float32, bfloat16 or float16"
        )
    if not parameter.is_contiguous():
        raise UnsupportedModel(f"{name} is not contiguous; call .contiguous() on it before joining")
    if parameter.is_meta:
        raise UnsupportedModel(f"{name} is on the meta device; materialise the model before joining")


def _embeddings_and_heads(model: nn.Module) -> set[str]:
    """Weights of embeddings, and of linear layers that map to as many classes as an embedding has."""
    modules = dict(model.named_modules())
    embeddings = {n: m for n, m in modules.items() if isinstance(m, nn.Embedding)}
    sizes = {m.num_embeddings for m in embeddings.values()}
    heads = [n for n, m in modules.items() if isinstance(m, nn.Linear) and m.out_features in sizes]
    names = [f"{n}.{leaf}" if n else leaf for n in [*embeddings, *heads] for leaf in ("weight", "bias")]
    return {plain_name(name) for name in names}
