"""How the ranks of an island exchange their frames: one small all-reduce per step boundary, on a gloo group of its own.

It is begun at one boundary and ended at the next, so it has a whole step to run. The user's own groups are never used:
a collective in the background would come between theirs, in another order at every rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from diloco_common.errors import ConfigError, IslandBroken
from diloco_worker.core.island_log import LEADER_BYTES, RANK_BYTES

TIMEOUT_S = 1800.0
"""A rank that is away for longer has ended: as in the collectives of torch."""
_GROUPS = itertools.count()
"""Of this process. All ranks join alike, so they count alike."""
GOODBYE_S = 5.0
"""How long ranks wait for each other when they leave."""
LOOK_S = 0.05
"""How often they look whether all are there."""


class Exchange(Protocol):
    """Every rank's frame goes to every rank."""

    def begin(self, frame: bytes) -> None:
        """Post this rank's frame. Never waits."""

    def look(self) -> list[bytes] | None:
        """The frames that were posted last, in the order of the ranks. None: nothing was posted.

        Waits until every rank has posted: no longer than their own collectives make them wait. One rank may look while
        the others do not. Raises IslandBroken.
        """

    def end(self) -> list[bytes] | None:
        """As `look`, once: then nothing is posted."""


class IslandGroup:
    """The ranks of an island, with a gloo group of their own. Making it is a collective call."""

    def __init__(self, island: Any) -> None:
        """`island`: a process group, or a device mesh. Raises ConfigError."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "island= needs torch.distributed: call init_process_group before join, under torchrun for example"
            )
        ranks = _ranks_of(island)
        self.ranks = ranks
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self._store = _own_store(ranks)
        self._group: Any = dist.ProcessGroupGloo(self._store, self.rank, self.size, timedelta(seconds=TIMEOUT_S))

    def agree(self, text: str) -> str:
        """The leader's text, at all ranks. At most 200 bytes."""
        return self.all_of(text)[0]

    def all_of(self, text: str) -> list[str]:
        """The text of every rank, in their order. At most 200 bytes each."""
        mine = torch.zeros(256, dtype=torch.uint8)
        data = text.encode()
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.zeros_like(mine) for _ in range(self.size)]
        self._group.allgather([everyone], [mine]).wait()
        return [bytes(one.tolist()).rstrip(b"\0").decode() for one in everyone]

    def exchange(self) -> GlooExchange:
        return GlooExchange(self._group, self.rank, self.size)

    async def goodbye(self) -> None:
        """Wait until all ranks are here, or for a few seconds.

        By the store. A barrier of gloo, `monitored_barrier` too, waits for rank 0 as long as the group does (torch
        2.13): a rank that fails alone would never end, and torchrun would never learn that it has failed.
        """
        with contextlib.suppress(RuntimeError, TimeoutError):  # the store has ended already; not all ranks leave
            async with asyncio.timeout(GOODBYE_S):
                self._store.add("leave", 1)
                while self._store.add("leave", 0) < self.size:  # noqa: ASYNC110 - other processes add
                    await asyncio.sleep(LOOK_S)


class GlooExchange:
    """An `Exchange`: each rank writes into its own part of a vector of zeros, and the maximum is taken."""

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
    """Where the ranks of a gloo group find each other, under a name of its own.

    `new_group` would meet under the same name again after torchrun has restarted all ranks, and read from the store
    where ranks listened that have ended (torch 2.13).
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"diloco-island/{restarts}/{next(_GROUPS)}/{ranks[0]}"
    return dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())


def _places(size: int) -> Sequence[slice]:
    """Where each rank's frame lies."""
    return [slice(0, LEADER_BYTES)] + [
        slice(LEADER_BYTES + i * RANK_BYTES, LEADER_BYTES + (i + 1) * RANK_BYTES) for i in range(size - 1)
    ]


def _ranks_of(island: Any) -> list[int]:
    """Raises ConfigError."""
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
