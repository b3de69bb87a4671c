"""`python -m diloco_chaos`: a run without faults, a run with faults, and the comparison of both."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_chaos.faults import ChaosCluster, ChaosRun, Fault, make_plan
from diloco_chaos.result import make_baseline, make_result, summary
from diloco_common import units
from diloco_common.command import new_app, run_app
from diloco_common.errors import EXIT_OK, EXIT_UNEXPECTED
from diloco_common.options import NO_SETTINGS, Flag, SettingsOptions, number, setting, settings_from
from diloco_common.settings import Settings
from diloco_common.settings_loader import Given
from diloco_common.wire.addresses import write_json
from diloco_deploy.run.folder import ClusterFolder, Outputs
from diloco_deploy.run.members import names
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
"""They pack a week of training into minutes: small steps of a fixed length that leave the machine mostly idle."""
_MINUTES = number(float, 0.01, 10_000.0, "minutes, from 0.01 to 10000")
_SECONDS = number(units.seconds, 0.1, 10_000.0, "seconds, from 0.1 to 10000, such as 5s")
_SHARE = number(float, 0.0, 0.9, "a share, from 0 to 0.9")


@Parameter(name="*")
@dataclass(frozen=True)
class ClusterOptions:
    shards: Annotated[str | None, setting("cluster.shards", "N", "parameter-server processes")] = None
    workers: Annotated[str | None, setting("cluster.workers", "N", "learners", default=8)] = None
    seed: Annotated[
        str | None, setting("run.seed", "N", "seed of the plan, the initial weights and the order of the data")
    ] = None
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder for histories and logs", default="runs/chaos")
    ] = None

    def settings(self, options: SettingsOptions) -> Settings:
        """Raises ConfigError."""
        flags = {
            "cluster.shards": self.shards, "cluster.workers": self.workers, "cluster.folder": self.folder,
            "run.seed": self.seed,
        }  # fmt: skip
        found = settings_from(options, flags, defaults=DEFAULTS)
        check_cluster(found)
        return found


@Parameter(name="*")
@dataclass(frozen=True)
class HarmOptions:
    minutes: Annotated[float, Parameter(converter=_MINUTES, metavar="M", help="length of each run")] = 1.0
    every: Annotated[float, Parameter(converter=_SECONDS, metavar="5s", help="time between two faults")] = 5.0
    dead: Annotated[
        float, Parameter(converter=_SHARE, metavar="SHARE", help="share of the time that workers are dead or frozen")
    ] = 0.2

    @property
    def seconds(self) -> float:
        return 60.0 * self.minutes

    def plan(self, settings: Settings) -> tuple[Fault, ...]:
        cluster = settings.cluster
        return make_plan(
            seed=settings.run.seed, seconds=self.seconds, every_s=self.every, dead_share=self.dead,
            shards=names("shard", cluster.shards), workers=names("worker", cluster.workers),
        )  # fmt: skip


@app.default
def chaos(
    *,
    cluster: ClusterOptions = ClusterOptions(),
    harm: HarmOptions = HarmOptions(),
    gap: Annotated[
        float,
        Parameter(converter=_SECONDS, metavar="3s", help="longest time that a living worker may go without a step"),
    ] = 3.0,
    no_baseline: Annotated[Flag, Parameter(help="skip the fault-free run: half the time, but no goodput")] = False,
    json: Annotated[Path | None, Parameter(metavar="FILE.json", help="write the result here")] = None,
    options: SettingsOptions = NO_SETTINGS,
) -> int:
    """Run a cluster on this machine without faults. Then run one, and kill and freeze its workers and shards according
    to a seeded plan. Every process records its history. The histories show how much work got through, and whether any
    was lost or counted twice. Exit code 1 if a promise was broken.
    """
    settings, baseline = cluster.settings(options), None
    plan = harm.plan(settings)
    with Interrupts() as interrupts:
        if not no_baseline:
            _tell(f"without faults, for {harm.seconds:.0f} s")
            run, histories = _run(settings, "fault-free", (), harm.seconds, interrupts)
            baseline = make_baseline(histories, run)
        _tell(f"{len(plan)} faults in {harm.seconds:.0f} s, seed {settings.run.seed}")
        run, histories = _run(settings, "hurt", plan, harm.seconds, interrupts)
    result = make_result(histories, run, plan, baseline, seed=settings.run.seed, gap_max_s=gap)
    print("\n" + summary(result), flush=True)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        write_json(json, result)
        print(f"written: {json}")
    return EXIT_UNEXPECTED if result["violations"] else EXIT_OK


def _run(
    settings: Settings, name: str, plan: tuple[Fault, ...], seconds: float, interrupts: Interrupts,
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
        run = ChaosCluster(mine, files, supervisor, interrupts, _tell).run(plan, seconds)
        files.clear_addresses()
    return run, read_histories(history)


def _tell(words: str) -> None:
    print(words, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_app(app, argv)


if __name__ == "__main__":
    sys.exit(main())
