"""Which models trained by several processes may join: those of an island.

Without `island=`, the ranks of such a model would join as separate learners. Under some wrappers they would drift apart
unnoticed; under others they would merge different halves of the model. So they are refused before anything is sent: by
the model's types or, where these do not tell, because the process is one of several. In an island, wrappers that it
cannot take apart are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from diloco_common.errors import UnsupportedModel, WrongCall, shown
from diloco_worker.core import names

FSDP2 = "torch.distributed.fsdp.FSDPModule"
DTENSOR = "a DTensor, of fully_shard (FSDP2) or of tensor parallelism"
Island: TypeAlias = Any
"""Who trains this replica: a process group or a device mesh of torch, whose ranks train it together; or None or
"alone", this process by itself, whatever torch.distributed has started."""
IN_ISLANDS = frozenset({"DistributedDataParallel", "fully_shard (FSDP2)"})
SUPPORTED = (
    "islands take DistributedDataParallel, and fully_shard (FSDP2) on a mesh of one dimension, or of two (HSDP), whose "
    "parameters are Replicate or Shard(0)"
)

WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FullyShardedDataParallel (FSDP1)",
    FSDP2: "fully_shard (FSDP2)",
    "deepspeed.runtime.engine.DeepSpeedEngine": "DeepSpeed",
}
"""Type of a module -> name of the wrapper. As strings: importing the types takes seconds, and not all are installed."""
ALONE = (
    "start one process per device without torchrun, each a learner of its own (CUDA_VISIBLE_DEVICES=0, 1, ...), and "
    "join the model itself, with nothing of the kind around it"
)
WHAT_TO_DO = (
    "if all ranks train one model with DistributedDataParallel or fully_shard (FSDP2), let all of them call "
    f"join(..., island=torch.distributed.group.WORLD); else {ALONE}"
)


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of this process among those started together."""

    rank: int = 0
    size: int = 1
    seen_in: str = ""
    """Where this was found, as text."""


def check(model: nn.Module, rank: Rank, island: Island) -> None:
    """Refuse what several processes train together without an island, or in a way that an island does not support.
    Raises UnsupportedModel, whose message says what to do, and WrongCall if `island` is invalid."""
    if isinstance(island, str) and island != "alone":
        raise UnsupportedModel(f'island={island!r} is neither "alone", nor a process group, nor a device mesh')
    if not isinstance(island, str | None) and not hasattr(island, "size"):
        raise WrongCall(f'island= is {shown(island)}: give a process group or a device mesh of torch, or "alone"')
    if is_together(island):
        spread = next(_what_spreads(model, IN_ISLANDS), None)
        if spread is not None:
            raise UnsupportedModel(f"{spread}, and islands take DistributedDataParallel and fully_shard (FSDP2) only")
        return
    spread = next(_what_spreads(model, frozenset()), None)
    if spread is not None:
        raise UnsupportedModel(
            f"{spread}: several processes train it together, and what they merge one by one would not belong "
            f"together; {WHAT_TO_DO}"
        )
    if rank.size > 1 and island is None:
        raise UnsupportedModel(
            f"this process is one of {rank.size} ({rank.seen_in}). If each of them trains a model of its own, say so: "
            f'join(..., island="alone"). If not: {WHAT_TO_DO}'
        )


def is_together(island: Island) -> bool:
    """Whether several processes form one learner."""
    return island is not None and not isinstance(island, str)


def _what_spreads(model: nn.Module, allowed: Set[str]) -> Iterator[str]:
    for path, module in names.modules(model):
        where = path or "the model"
        for name in names.type_names(module):
            if name in WRAPPERS and WRAPPERS[name] not in allowed:
                yield f"{where} is wrapped in {WRAPPERS[name]}"
    is_sharded = any(name == FSDP2 for _, module in names.modules(model) for name in names.type_names(module))
    for path, parameter in names.parameters(model).items():
        what = _part_of(parameter)
        if what is not None and not (what is DTENSOR and is_sharded and WRAPPERS[FSDP2] in allowed):
            yield f"{path} is {what}"


def _part_of(parameter: Tensor) -> str | None:
    """How a parameter is split, None if it is whole. By attributes: see `WRAPPERS`."""
    if hasattr(parameter, "_is_flat_param") or hasattr(parameter, "_fsdp_flattened"):
        return "flattened by FullyShardedDataParallel (FSDP1)"
    if hasattr(parameter, "full_tensor"):
        return DTENSOR
    if hasattr(parameter, "ds_id") or hasattr(parameter, "ds_tensor"):
        return "partitioned by DeepSpeed ZeRO"
    return None
