"""Another number of workers for a running `diloco up`: a wish in its folder, and who carries it out.

`diloco scale` writes the wish, `diloco up` looks for it and answers in its record. The folder is the only way in: who
may write to it may do anything to the run anyway.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from diloco_common.errors import CannotConnect, ConfigError
from diloco_common.wire.addresses import write_json
from diloco_deploy.cluster.record import ClusterRecord, read_record

WORKERS_MAX = 256
ANSWER_WITHIN_S = 30.0
"""Longer than a worker that leaves may take, for `diloco up` answers only after it."""
_LOOK_S = 0.1


def wish_file(folder: Path) -> Path:
    return folder / "run" / "wish.json"


def take_wish(folder: Path) -> int | None:
    """The number of workers that somebody wants, once. None: nobody wants another one, or it makes no sense."""
    mine = wish_file(folder).with_suffix(".taken")  # ours alone: a wish that is written meanwhile waits
    try:
        wish_file(folder).rename(mine)
    except FileNotFoundError:
        return None
    try:
        wanted = json.loads(mine.read_text(encoding="utf-8"))["workers"]
    except (OSError, ValueError, KeyError, TypeError):
        wanted = None
    mine.unlink(missing_ok=True)
    return wanted if isinstance(wanted, int) and 1 <= wanted <= WORKERS_MAX else None


def scale_to(
    folder: Path,
    workers: int,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """The command. Raises ConfigError, and CannotConnect: no `diloco up` runs there, or it does not answer."""
    if not 1 <= workers <= WORKERS_MAX:
        raise ConfigError(f"--workers {workers}: must be a whole number from 1 to {WORKERS_MAX}")
    before = read_record(folder)
    if before is None:
        raise CannotConnect(
            f"no `diloco up` runs in {folder}; give its --folder, or start one: diloco up --folder {folder}"
        )
    if before.quorum > workers:
        raise ConfigError(
            f"--workers {workers} is below the quorum of {before.quorum} (sync.quorum), so no round could close; give "
            f"at least {before.quorum}"
        )
    if not before.training:
        raise _not_training(folder)
    write_json(wish_file(folder), {"workers": workers})
    deadline = clock() + ANSWER_WITHIN_S
    while (now := read_record(folder)) is None or now.workers != workers:
        if now is None or not now.training:
            wish_file(folder).unlink(missing_ok=True)
            raise _not_training(folder)
        if clock() > deadline:
            wish_file(folder).unlink(missing_ok=True)
            raise CannotConnect(f"`diloco up` in {folder} does not answer; look at it: diloco status --folder {folder}")
        wait(_LOOK_S)
    print(_words(before, workers))
    return 0


def _not_training(folder: Path) -> CannotConnect:
    return CannotConnect(
        f"`diloco up` in {folder} is not training yet, or no more (and one on Ray keeps its workers); look at it: "
        f"diloco status --folder {folder}"
    )


def _words(before: ClusterRecord, workers: int) -> str:
    change = workers - before.workers
    what = f"{change} start" if change > 0 else f"{-change} leave" if change < 0 else "as it was"
    return f"{before.workers} -> {workers} workers ({what}); see them come and go: diloco status --watch"
