"""`python -m diloco_chaos`: a run without faults, a run with faults, and the comparison of both."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from json import loads
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from diloco_chaos.cluster import ChaosCluster
from diloco_chaos.damage import LISTEN, Links, NoLinks, SmallDisks
from diloco_chaos.plan import ChaosRun, Fault, make_plan
from diloco_chaos.result import Result, make_baseline, make_result, summary
from diloco_chaos.timeline import check_timeline, draw
from diloco_common import quantities
from diloco_common.command import new_app, run_app
from diloco_common.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError
from diloco_common.options import NO_SETTINGS, Flag, SettingsOptions, number, setting, settings_from
from diloco_common.settings import Settings
from diloco_common.settings_loader import Given
from diloco_common.wire.addresses import write_json
from diloco_deploy.run.children import names
from diloco_deploy.run.folder import ClusterFolder, Outputs
from diloco_deploy.run.supervisor import Interrupts, Supervisor
from diloco_deploy.run.up import check_cluster
from diloco_simulator.verify.histories import Histories, read_histories

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
app = new_app("diloco_chaos", "Hurt a cluster on this machine, and check that nothing is lost.")
DEFAULTS = {name: Given(value, "a default of chaos") for name, value in _OURS.items()}
"""A week of training in minutes: small steps of a fixed length that leave the machine mostly idle."""
HEAL_S = 60.0
"""Every process must make progress within this many seconds after the last fault."""
_MINUTES = number(float, 0.01, 10_000.0, "minutes, from 0.01 to 10000")
_SECONDS = number(quantities.seconds, 0.1, 10_000.0, "seconds, from 0.1 to 10000, such as 5s")
_SHARE = number(float, 0.0, 0.9, "a share, from 0 to 0.9")
_COUNT = number(quantities.count, 0, 1000, "a number, from 0 to 1000")


@app.default
def chaos(
    *,
    minutes: Annotated[float, Parameter(converter=_MINUTES, metavar="M", help="length of each run")] = 1.0,
    every: Annotated[float, Parameter(converter=_SECONDS, metavar="5s", help="time between two faults")] = 5.0,
    shards: Annotated[str | None, setting("cluster.shards", "N", "parameter-server processes")] = None,
    workers: Annotated[str | None, setting("cluster.workers", "N", "learners", default=8)] = None,
    seed: Annotated[
        str | None, setting("run.seed", "N", "of the plan, the initial weights and the order of the data")
    ] = None,
    dead: Annotated[
        float, Parameter(converter=_SHARE, metavar="SHARE", help="share of the time that workers are dead or frozen")
    ] = 0.2,
    gap: Annotated[
        float,
        Parameter(converter=_SECONDS, metavar="3s", help="longest time that a living worker may go without a step"),
    ] = 3.0,
    hostile: Annotated[
        int, Parameter(converter=_COUNT, metavar="N", help="number of hostile workers, which lie, replay and flood")
    ] = 0,
    disk_full: Annotated[Flag, Parameter(help="fill the disks of shards too (needs root)")] = False,
    json: Annotated[Path | None, Parameter(metavar="FILE.json", help="write the result here")] = None,
    timeline: Annotated[Path | None, Parameter(metavar="FILE.png|svg", help="draw a timeline of the run")] = None,
    baseline: Annotated[
        Path | None, Parameter(metavar="FILE.json", help="use the fault-free run of an earlier --json")
    ] = None,
    no_baseline: Annotated[Flag, Parameter(help="no fault-free run: half the time, but no goodput")] = False,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder for histories and logs", default="runs/chaos")
    ] = None,
    options: SettingsOptions = NO_SETTINGS,
) -> int:
    """Run a cluster on this machine without faults. Then run one, and kill and freeze its workers and shards by a
    seeded plan. Every process records its history. The histories show how much work got through, and whether any was
    lost or counted twice. Exit code 1 if a promise was broken.
    """
    flags = {"cluster.shards": shards, "cluster.workers": workers, "cluster.folder": folder, "run.seed": seed}
    settings, seconds = settings_from(options, flags, defaults=DEFAULTS), 60.0 * minutes
    check_cluster(settings)
    if timeline is not None:
        check_timeline(timeline)
    enemies = [f"hostile-{index}" for index in range(int(hostile))]
    if enemies:
        settings = _without(settings, len(enemies))
    usual = _read_baseline(baseline) if baseline else None
    links, cluster = _links(), settings.cluster
    if links is not None:
        settings = _within(settings)
    plan = make_plan(
        seed=settings.run.seed, seconds=seconds, every_s=every, dead_share=dead, disk_full=disk_full,
        shards=names("shard", cluster.shards), workers=names("worker", cluster.workers), links=links is not None,
    )  # fmt: skip
    with Interrupts() as interrupts:
        if usual is None and not no_baseline:
            _tell(f"without faults, for {seconds:.0f} s")
            run, histories = _run(settings, "fault-free", (), seconds, interrupts, links)
            usual = make_baseline(histories, run, _comparable(settings))
        elif usual is not None and usual["settings"] != _comparable(settings):
            raise ConfigError(
                f"--baseline {baseline}: its fault-free run had other settings. Give the same settings, or leave out "
                "--baseline"
            )
        _tell(f"{len(plan)} faults in {seconds:.0f} s, seed {settings.run.seed}")
        if enemies:
            _tell(f"beside {', '.join(enemies)}")
        run, histories = _run(
            settings, "hurt", plan, seconds, interrupts, links, disk_full=disk_full, hostile=enemies
        )  # fmt: skip
    result = make_result(
        histories, run, plan, usual, seed=settings.run.seed, gap_max_s=gap, hostile=enemies,
    )  # fmt: skip
    print("\n" + summary(result), flush=True)
    _write(result, histories, run, json, timeline)
    return EXIT_UNEXPECTED if result["violations"] else EXIT_OK


def _run(
    settings: Settings, name: str, plan: tuple[Fault, ...], seconds: float, interrupts: Interrupts,
    links: Links | None, *, disk_full: bool = False, hostile: Sequence[str] = (),
) -> tuple[ChaosRun, Histories]:  # fmt: skip
    """Run one cluster in its own folder. Empties the folder first."""
    folder = settings.cluster.folder / name
    files = ClusterFolder(folder, Outputs())
    history = folder / "history"
    with files.owned(), Supervisor() as supervisor:
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


def _write(result: Result, histories: Histories, run: ChaosRun, json: Path | None, timeline: Path | None) -> None:
    for path in (json, timeline):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json is not None:
        write_json(json, result)
        print(f"written: {json}")
    if timeline is not None:
        draw(histories, run, result, timeline)
        print(f"written: {timeline}")


def _read_baseline(path: Path) -> Result:
    try:
        found = loads(path.read_text(encoding="utf-8"))
        return dict(found["baseline"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a result of chaos; give the file of an earlier --json") from None


def _comparable(settings: Settings) -> dict[str, Any]:
    """The settings that a fault-free run depends on."""
    found = settings.model_dump(mode="json")
    for section in ("shard", "security"):
        del found[section]
    del found["cluster"]["folder"], found["cluster"]["restart"], found["run"]["history"], found["run"]["seed"]
    return found


def _tell(words: str) -> None:
    print(words, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_app(app, argv)
