"""An island on torch.distributed: which models may join as one, how its ranks find each other, and how they exchange
frames.

Each step boundary uses one small all-reduce on our own gloo group. It starts at one boundary and ends at the next, so
it has a whole step to run. The user's groups are never used: background collectives would interleave with theirs in a
different order on every rank.

Without `island=`, the ranks that train one model would join as separate learners. Under some wrappers they would drift
apart unnoticed; under others they would merge different halves of the model. So they are refused before anything is
sent: by the model's types or, where these do not tell, because the process is one of several. In an island, wrappers
that this code cannot take apart are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco_common.errors import ConfigError, IslandBroken, UnsupportedModel, WrongCall, shown
from diloco_common.wire.calls import AGAIN_S, SETTLE_S
from diloco_common.wire.manifest import model_digest
from diloco_worker.core import names, parts
from diloco_worker.core.council_log import LEADER_BYTES, RANK_BYTES
from diloco_worker.core.parts import SUPPORTED, Holding, Seat, Sharing
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell.council import IslandCouncil
from diloco_worker.view import LearnerState

_GROUPS = itertools.count()
"""Counts this process's groups. All ranks join in the same order, so their counts agree."""


def init_island(backend: str | None = None, **options: Any) -> None:
    """`torch.distributed.init_process_group` that also works after a restart by `torchrun --max-restarts`.

    Ranks find each other through a store. The store of torchrun's agent outlives them: in torch 2.13, restarted ranks
    read there the addresses of their predecessors, and gloo fails with "Connection refused". Here each start uses its
    own names. Under another launcher it is the plain call. `options`: those of `init_process_group`, except `store`,
    `rank`, `world_size` and `init_method`, which the launcher supplies. Raises WrongCall if there is none, or if called
    twice.
    """
    from torch.distributed.rendezvous import rendezvous  # takes a second

    try:
        if (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT")) is not None:
            timeout = {name: options[name] for name in ("timeout",) if name in options}
            store, rank, size = next(rendezvous("env://", **timeout))
            store = dist.distributed_c10d.PrefixStore(f"start-{attempt}", store)
            options |= {"store": store, "rank": rank, "world_size": size}
        dist.init_process_group(backend, **options)
    except ValueError as error:  # from torch: no torchrun, called twice, ...
        why = str(error).partition("\n")[0]
        raise WrongCall(f"init_island: {why}; call it once, in a script that torchrun starts") from None


class IslandGroup:
    """The ranks of an island, with their own gloo group. The constructor is a collective call."""

    def __init__(self, island: Any) -> None:
        """`island`: a process group or a device mesh. Raises ConfigError."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "island= needs torch.distributed: call init_process_group before join, under torchrun for example"
            )
        self.ranks = _ranks_of(island)
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._store = _own_store(self.ranks)
        self._group: Any = dist.ProcessGroupGloo(
            self._store, self.rank, self.size, dist.distributed_c10d.default_pg_timeout
        )

    def agree(self, text: str) -> str:
        """The first 256 bytes of the leader's text, on all ranks."""
        return self.all_of(text)[0]

    def all_of(self, text: str) -> list[str]:
        """The first 256 bytes of the text of each rank, in order."""
        mine = torch.zeros(256, dtype=torch.uint8)
        data = text.encode()[: len(mine)]
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.zeros_like(mine) for _ in range(self.size)]
        self._group.allgather([everyone], [mine]).wait()
        return [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in everyone]

    def council(self) -> IslandCouncil:
        exchange = GlooExchange(self._group, self.rank, self.size)
        return IslandCouncil(self.rank, self.size, exchange, self.goodbye, self.agree)

    def agree_on(self, name: str, saved: LearnerState | None) -> str:
        """The leader's name, for all ranks. Raises ConfigError.

        `saved`: the state that this rank resumes. Ranks with different counts would decide differently.
        """
        digest = hashlib.sha256(repr(saved).encode()).hexdigest()
        self._check_equal(digest, "state, or only some ranks bring one (state=); load the same checkpoint in all")
        return self.agree(name)

    def replica(self, model: SharedSet, mean_merge: Collection[str] | None) -> Replica:
        """This rank's part of the model. Raises UnsupportedModel, and ConfigError if ranks bring different models."""
        replica = Replica(model, mean_merge, seat=Seat(self.rank, self.size, self._located))
        self._check_equal(model_digest(replica.specs), "model; build the same one in all")
        return replica

    def _check_equal(self, digest: str, what: str) -> None:
        """Compare the digests of all ranks. Raises ConfigError."""
        digests = self.all_of(digest)
        if different := [rank for rank, other in enumerate(digests) if other != digests[0]]:
            raise ConfigError(f"ranks {different} of the island differ from rank 0: {what}")

    def _located(self, tensor: Tensor) -> tuple[Holding, Sharing]:
        ranks = sorted(tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
        if ranks != sorted(self.ranks):
            raise UnsupportedModel(f"the model's device mesh has ranks {ranks}, the island {sorted(self.ranks)}")
        try:
            return parts.located(tensor)
        except ValueError as error:
            raise UnsupportedModel(f"a parameter {error}; {SUPPORTED}") from None

    async def goodbye(self) -> None:
        """Wait until all ranks are here, but only for a few seconds.

        Uses the store, because a gloo barrier, even `monitored_barrier`, waits for rank 0 as long as the group's
        timeout (torch 2.13): a rank that fails alone would not end, and torchrun would not learn of its failure.
        """
        with contextlib.suppress(RuntimeError, TimeoutError):  # the store has ended, or not all ranks leave
            async with asyncio.timeout(SETTLE_S):
                self._store.add("leave", 1)
                while self._store.add("leave", 0) < self.size:  # noqa: ASYNC110 - other processes add
                    await asyncio.sleep(AGAIN_S)


class GlooExchange:
    """An `Exchange`: each rank writes to its own part of a vector of zeros, and the maximum combines them."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._places = _places(size)
        self._mine = self._places[rank]
        self._buffers = [torch.zeros(self._places[-1].stop, dtype=torch.uint8) for _ in range(2)]
        self._work: Any = None
        self._posted: Tensor | None = None

    def begin(self, frame: bytes) -> None:
        self._buffers.reverse()
        posted = self._posted = self._buffers[0]
        flat = posted.numpy()
        flat.fill(0)
        flat[self._mine.start : self._mine.start + len(frame)] = np.frombuffer(frame, np.uint8)
        try:
            self._work = self._group.allreduce([posted], dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise _broken(error) from None

    def look(self) -> list[bytes] | None:
        if self._work is None or self._posted is None:
            return None
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _broken(error) from None
        flat = self._posted.numpy()
        return [flat[place].tobytes() for place in self._places]

    def end(self) -> list[bytes] | None:
        try:
            return self.look()
        finally:
            self._work = None


def _own_store(ranks: Sequence[int]) -> Any:
    """The store in which the ranks of a gloo group find each other, under its own name.

    After torchrun restarts all ranks, `new_group` would reuse a name, and read the addresses of ended ranks (torch
    2.13).
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"diloco-island/{restarts}/{next(_GROUPS)}/{ranks[0]}"
    return dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())


def _places(size: int) -> Sequence[slice]:
    ends = [LEADER_BYTES + i * RANK_BYTES for i in range(size)]
    return [slice(start, end) for start, end in itertools.pairwise([0, *ends])]


def _ranks_of(island: Any) -> list[int]:
    if hasattr(island, "mesh") and hasattr(island, "mesh_dim_names"):
        return [int(rank) for rank in island.mesh.flatten().tolist()]
    try:
        return list(dist.get_process_group_ranks(island))
    except (KeyError, ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"island={island!r} is neither a process group nor a device mesh; the usual is island=dist.group.WORLD"
        ) from None


def _broken(error: RuntimeError) -> IslandBroken:
    return IslandBroken(
        f"another rank of the island has ended, or does not answer: {str(error).splitlines()[0][:200]}; torchrun "
        "restarts all ranks together if it may (--max-restarts)"
    )


FSDP2 = "torch.distributed.fsdp.FSDPModule"
DTENSOR = "a DTensor, of fully_shard (FSDP2) or of tensor parallelism"
Island: TypeAlias = Any
"""Who trains this replica: a process group or a device mesh of torch, whose ranks train it together; or None or
"alone", this process by itself, whatever torch.distributed has started."""
IN_ISLANDS = frozenset({"DistributedDataParallel", "fully_shard (FSDP2)"})
WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FullyShardedDataParallel (FSDP1)",
    FSDP2: "fully_shard (FSDP2)",
    "deepspeed.runtime.engine.DeepSpeedEngine": "DeepSpeed",
}
"""Type of a module -> name of the wrapper. As strings: importing the types takes seconds, and not all are installed."""
ALONE = (
    "start one process per device without torchrun, each a learner of its own (CUDA_VISIBLE_DEVICES=0, 1, ...), and "
    "join the model itself, with no such wrapper around it"
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
            f"{spread}: several processes train it together, and if each merged its own part, the parts would not "
            f"match; {WHAT_TO_DO}"
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


def check_ranks(model: nn.Module, island: Island) -> None:
    """Raises UnsupportedModel if several processes train this model in a way that we do not support."""
    rank = _rank()
    try:
        check(model, rank, island)
    except UnsupportedModel as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            # When one rank ends, torchrun ends the others, perhaps before rank 0 has logged the reason. It prints this
            # file after everything else.
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        if rank.rank > 0:
            raise UnsupportedModel(
                f"rank {rank.rank} of {rank.size} ends: this model cannot be joined like this; rank 0 says what to do"
            ) from None
        raise


def _rank() -> Rank:
    """The rank by torch.distributed or, before it is initialized, by the launcher's environment variables."""
    group = dist
    if group.is_available() and group.is_initialized():
        return Rank(group.get_rank(), group.get_world_size(), "a process group is initialized")
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal():
        return Rank(int(rank), int(size), "RANK and WORLD_SIZE are set, as by torchrun")
    return Rank()
