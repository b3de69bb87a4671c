"""`diloco chaos`: a run without faults, a run with faults, and the comparison of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_common.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError
from diloco_common.observe.histories import Histories
from diloco_common.observe.history import read_histories
from diloco_common.settings import Settings
from diloco_common.settings_loader import Given
from diloco_common.wire.addresses import write_json
from diloco_deploy.chaos.cluster import ChaosCluster
from diloco_deploy.chaos.damage import LISTEN, Links, NoLinks, SmallDisks
from diloco_deploy.chaos.plan import ChaosRun, Fault, make_plan
from diloco_deploy.chaos.result import Result, make_baseline, make_result, summary
from diloco_deploy.run.children import names
from diloco_deploy.run.folder import Files, Outputs
from diloco_deploy.run.supervisor import Interrupts, Supervisor
from diloco_deploy.run.up import check_cluster

_OURS: dict[str, object] = {
    "cluster.folder": "runs/chaos",
    "cluster.workers": 8,
    "worker.step_min_s": 0.1,
    "worker.threads": 1,
    "worker.checkpoint_every_s": 1.0,
    "model.layers": 1,
    "model.heads": 2,
    "model.width": 32,
    "model.context": 32,
    "train.batch": 4,
    "sync.fragments": 4,
    "sync.sync_every": 8,
    "lease.lease_s": 2.0,
    "lease.heartbeat_s": 0.5,
}
DEFAULTS = {name: Given(value, "a default of `diloco chaos`") for name, value in _OURS.items()}
"""A week of training in minutes: small steps of a fixed length that leave the machine mostly idle."""
HEAL_S = 60.0
"""Every process must make progress within this many seconds after the last fault."""


@dataclass(frozen=True)
class Chaos:
    """The options of the command."""

    seconds: float
    every_s: float
    dead_share: float
    gap_max_s: float
    disk_full: bool = False
    """Whether to fill disks, too. Needs root."""
    json: Path | None = None
    timeline: Path | None = None
    baseline: Path | None = None
    """The result of an earlier command, whose fault-free run is used; None: run one."""
    compared: bool = True
    """Whether there is a fault-free run. Without one, goodput is unknown."""
    hostile: int = 0
    """So many of the workers are hostile. The fault-free run has the others only."""


def run_chaos(settings: Settings, chaos: Chaos) -> int:
    """Run the command. The exit code says whether every promise was kept.

    Raises ConfigError, DataError, InUse, or NeverReady if the cluster does not come up.
    """
    check_cluster(settings)
    if chaos.timeline is not None:
        from diloco_deploy.chaos.timeline import check_timeline

        check_timeline(chaos.timeline)
    if chaos.hostile:
        settings = _without(settings, chaos.hostile)
    baseline = _read_baseline(chaos.baseline) if chaos.baseline else None
    cluster, hostile = settings.cluster, [f"hostile-{index}" for index in range(chaos.hostile)]
    links = _links()
    if links is not None:
        settings = _within(settings)
    plan = make_plan(
        seed=settings.run.seed, seconds=chaos.seconds, every_s=chaos.every_s, dead_share=chaos.dead_share,
        shards=names("shard", cluster.shards), workers=names("worker", cluster.workers), disk_full=chaos.disk_full,
        links=links is not None,
    )  # fmt: skip
    with Interrupts() as interrupts:
        if baseline is None and chaos.compared:
            _tell(f"without faults, for {chaos.seconds:.0f} s")
            run, histories = _run(settings, "fault-free", (), chaos.seconds, interrupts, links)
            baseline = make_baseline(histories, run, _comparable(settings))
        elif baseline is not None and baseline["settings"] != _comparable(settings):
            raise ConfigError(
                f"--baseline {chaos.baseline}: its fault-free run had other settings. Give the same settings, or leave "
                "out --baseline"
            )
        _tell(f"{len(plan)} faults in {chaos.seconds:.0f} s, seed {settings.run.seed}")
        if hostile:
            _tell(f"beside {', '.join(hostile)}")
        run, histories = _run(
            settings, "hurt", plan, chaos.seconds, interrupts, links, disk_full=chaos.disk_full, hostile=hostile
        )
    result = make_result(
        histories, run, plan, baseline, seed=settings.run.seed, gap_max_s=chaos.gap_max_s,
        gapless=settings.sync.on_commit == "carry", hostile=hostile,
    )  # fmt: skip
    print("\n" + summary(result), flush=True)
    _write(chaos, result, histories, run)
    return EXIT_UNEXPECTED if result["violations"] else EXIT_OK


def _run(
    settings: Settings,
    name: str,
    plan: tuple[Fault, ...],
    seconds: float,
    interrupts: Interrupts,
    links: Links | None,
    *,
    disk_full: bool = False,
    hostile: Sequence[str] = (),
) -> tuple[ChaosRun, Histories]:
    """Run one cluster in its own folder. Empties the folder first."""
    folder = settings.cluster.folder / name
    files = Files(folder, Outputs())
    history = folder / "history"
    with files.owned(), Supervisor(restart=True) as supervisor:
        files.prepare(settings, fresh=True)
        shutil.rmtree(history, ignore_errors=True)
        mine = settings.model_copy(
            update={
                "run": settings.run.model_copy(update={"history": history.absolute(), "tokens": 0}),
                "cluster": settings.cluster.model_copy(update={"folder": folder}),
            }
        )
        disks = None
        if disk_full:
            shards = names("shard", settings.cluster.shards)
            disks = SmallDisks({name: files.shard_folder(index) for index, name in enumerate(shards)})
        run = ChaosCluster(mine, files, supervisor, interrupts, _tell, disks, links, hostile).run(plan, seconds, HEAL_S)
        files.clear_addresses()
    return run, read_histories(history)


def _links() -> Links | None:
    """The network links of the clusters. If they cannot be cut here, print why, and return None."""
    try:
        return Links()
    except NoLinks as why:
        _tell(f"no links are cut: cutting them needs root, nft and a network namespace ({why})")
        return None


def _without(settings: Settings, hostile: int) -> Settings:
    """The settings of a cluster of the honest workers alone. Raises ConfigError."""
    honest = settings.cluster.workers - hostile
    if honest < 2:
        raise ConfigError(
            f"--hostile {hostile} leaves {honest} of {settings.cluster.workers} workers; leave at least 2"
        )
    return settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"workers": honest})})


def _within(settings: Settings) -> Settings:
    """Settings for a network namespace: shards listen on every address, because nobody else can reach them."""
    shard = settings.shard.model_copy(update={"listen": LISTEN})
    security = settings.security.model_copy(update={"insecure": True})
    return settings.model_copy(update={"shard": shard, "security": security})


def _write(chaos: Chaos, result: Result, histories: Histories, run: ChaosRun) -> None:
    if chaos.json is not None:
        chaos.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(chaos.json, result)
        print(f"written: {chaos.json}")
    if chaos.timeline is not None:
        from diloco_deploy.chaos.timeline import draw

        chaos.timeline.parent.mkdir(parents=True, exist_ok=True)
        draw(histories, run, result, chaos.timeline)
        print(f"written: {chaos.timeline}")


def _read_baseline(path: Path) -> Result:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["baseline"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a result of `diloco chaos`; give the file of an earlier --json") from None


def _comparable(settings: Settings) -> dict[str, Any]:
    """The settings that a fault-free run depends on."""
    found = settings.model_dump(mode="json")
    for section in ("shard", "security"):
        del found[section]
    del found["cluster"]["folder"], found["cluster"]["restart"], found["run"]["history"], found["run"]["seed"]
    return found


def _tell(words: str) -> None:
    print(words, flush=True)
