"""The process group of an island, also after torchrun has started all ranks again."""

from __future__ import annotations

import os
from typing import Any

from diloco_common.errors import WrongCall


def init_island(backend: str | None = None, **options: Any) -> None:
    """`torch.distributed.init_process_group`, and it works after a restart by `torchrun --max-restarts`, too.

    The ranks find each other by a store. That of torchrun's agent outlives them: in torch 2.13 ranks that were started
    again read there where those before them listened, and gloo fails with "Connection refused". Here each start
    has names of its own. Without torchrun it is the plain call. `options`: of `init_process_group`, but not `store`,
    `rank`, `world_size` and `init_method`, which are torchrun's. Raises WrongCall without torchrun, or a second time.
    """
    try:
        _init(backend, options)
    except ValueError as error:  # of torch: no torchrun, twice, ...
        why = str(error).partition("\n")[0]
        raise WrongCall(f"init_island: {why}; call it once, in a script that torchrun starts") from None


def _init(backend: str | None, options: dict[str, Any]) -> None:
    from torch.distributed import distributed_c10d as c10d  # takes a second
    from torch.distributed.rendezvous import rendezvous

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is not None:
        timeout = {name: options[name] for name in ("timeout",) if name in options}
        store, rank, size = next(rendezvous("env://", **timeout))
        options |= {"store": c10d.PrefixStore(f"start-{attempt}", store), "rank": rank, "world_size": size}
    c10d.init_process_group(backend, **options)
