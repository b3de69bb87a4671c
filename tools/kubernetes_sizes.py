"""Writes the tables of docs/kubernetes-sizes.md, with the formulas of `diloco plan`.

`python tools/kubernetes_sizes.py` writes them, `--check` says whether they are up to date. A table stands between
`<!-- table: NAME -->` and `<!-- end -->`; the text around it stays.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from diloco_common import formulas, units
from diloco_common.formulas import BITS
from diloco_common.settings import CheckpointSettings, SyncSettings
from diloco_planner.choice import TRAINING_BYTES
from diloco_planner.sizes import learner_bytes

WORKERS = 8
HEADROOM = 1.25
"""A limit is this many times the plan's figure. Above its memory limit, the kernel kills the shard."""
UNDER_WAY = 2
KEEP = CheckpointSettings().keep
SYNC = SyncSettings()
assert SYNC.sync_every != "auto"
SYNC_EVERY = SYNC.sync_every
GIB = 2**30


class Model(NamedTuple):
    """A size that people ask for, and how it would be cut and placed."""

    name: str
    params: float
    shards: int
    fragments: int
    ranks: int
    """GPUs of one worker: an island under FSDP2 from 7 B on."""
    step_s: float
    """Seconds of its inner step."""


MODELS = (
    Model("0.1 B", 1e8, 1, 24, 1, 1.0),
    Model("1 B", 1e9, 2, 24, 1, 1.0),
    Model("7 B", 7e9, 4, 24, 8, 4.0),
    Model("70 B", 7e10, 32, 96, 64, 20.0),
)


def page(text: str) -> str:
    """The page with its tables rewritten. Raises ValueError if a table is missing here or on the page."""
    made = {"shards": shards(), "workers": workers()}
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    missing = made.keys() ^ {match[2] for match in pattern.finditer(text)}
    if missing:
        raise ValueError(f"tables that are only here or only on the page: {', '.join(sorted(missing))}")
    return pattern.sub(lambda match: f"{match[1]}\n{made[match[2]]}\n\n{match[3]}", text)


def shards() -> str:
    """The table of what the pod of one shard requests."""
    head = ("model", "inner step", "shards", "fragments", "peak, by the plan", "memory limit", "disk",
            f"with {KEEP} checkpoints", "volume", "writes")  # fmt: skip
    return _table(head, map(_shard, MODELS))


def _shard(model: Model) -> Sequence[str]:
    owned, held = model.params / model.shards, model.fragments / model.shards
    peak = formulas.shard_memory(owned, math.ceil(held), WORKERS, BITS[SYNC.push], "nesterov", SYNC.pull)
    each = formulas.version_bytes("nesterov", SYNC.pull)
    disk, full = (formulas.shard_disk(owned, owned / held, each, kept) for kept in (0, KEEP))
    writes = formulas.disk_rate(owned, each, SYNC_EVERY, model.step_s)
    return (
        model.name, f"{model.step_s:g} s", str(model.shards), str(model.fragments), units.size(peak),
        gibibytes(HEADROOM * peak), units.size(disk), units.size(full), gibibytes(HEADROOM * full),
        f"{units.size(writes)}/s",
    )  # fmt: skip


def workers() -> str:
    """The table of what one GPU of a worker holds."""
    head = ("model", "GPUs of a worker", "training", "anchors, residuals", "under way", "sum, each GPU")
    return _table(head, map(_worker, MODELS))


def _worker(model: Model) -> Sequence[str]:
    each = round(model.params / model.fragments / model.ranks)
    found = learner_bytes(each, model.fragments, push=SYNC.push, pull=SYNC.pull, under_way=UNDER_WAY)
    training = TRAINING_BYTES * found.elements
    sizes = (training, found.kept, found.under_way, training + found.peak)
    return (model.name, str(model.ranks), *map(units.size, sizes))


def gibibytes(num_bytes: float) -> str:
    """The size as manifests write it, rounded up."""
    return f"{math.ceil(num_bytes / GIB)}Gi"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    from written import ROOT, written  # can be imported only if this file runs as a program

    target = ROOT / "docs/kubernetes-sizes.md"
    return written(target, page(target.read_text(encoding="utf-8")), __doc__)


if __name__ == "__main__":
    sys.exit(main())
