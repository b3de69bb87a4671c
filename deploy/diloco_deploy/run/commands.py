"""The commands `diloco up`, `init`, `resume` and `scale`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from diloco_common.command import NOT_WRITTEN, disk_errors
from diloco_common.errors import BadCheckpoint, ConfigError, DataError
from diloco_common.options import NO_SETTINGS, Config, Flag, SettingsOptions, setting, settings_from
from diloco_common.settings_loader import load_saved
from diloco_deploy.run.folder import ClusterFolder, Outputs, anchored, shown
from diloco_deploy.run.members import scale_to
from diloco_deploy.run.placement import place_anew, settle
from diloco_deploy.run.ray_up import bring_up_on_ray
from diloco_deploy.run.up import bring_up, check_cluster


def up(
    *,
    shards: Annotated[str | None, setting("cluster.shards", "N", "parameter-server processes")] = None,
    workers: Annotated[str | None, setting("cluster.workers", "N", "learners")] = None,
    tokens: Annotated[
        str | None, setting("run.tokens", "N", "end when this many tokens are merged, such as 2M; 0: never")
    ] = None,
    seed: Annotated[str | None, setting("run.seed", "N", "seed of the initial weights and the data order")] = None,
    data: Annotated[str | None, setting("data.source", "PATH", "file or folder of text, or 'stdlib'")] = None,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder for versions, logs, addresses and results")
    ] = None,
    track: Annotated[
        str | None, setting("worker.track", "TRACKER", "tensorboard:DIR, wandb:PROJECT or csv:FILE: learners' curves")
    ] = None,
    fresh: Annotated[Flag, Parameter(help="delete the run in the folder and start a new one")] = False,
    report: Annotated[
        Path | None, Parameter(metavar="FILE.json", help="the report", show_default="report.json in the folder")
    ] = None,
    export: Annotated[
        Path | None,
        Parameter(metavar="FILE.safetensors", help="the model", show_default="model.safetensors in the folder"),
    ] = None,
    on: Annotated[Literal["here", "ray"], Parameter(help="where to run: this machine, or its Ray cluster")] = "here",
    options: SettingsOptions = NO_SETTINGS,
) -> int:
    """Run shards and workers as processes on this machine and show their state. At the end, evaluate and export the
    global model. Ctrl-C ends the run cleanly; a second Ctrl-C ends it at once."""
    flags = {
        "cluster.shards": shards, "cluster.workers": workers, "cluster.folder": folder, "run.tokens": tokens,
        "run.seed": seed, "data.source": data, "worker.track": track,
    }  # fmt: skip
    settings = settings_from(options, flags)
    if on == "ray":
        return bring_up_on_ray(settings, Outputs(report=report, model=export), fresh=fresh)
    return bring_up(settings, Outputs(report=report, model=export), fresh=fresh)


RUN_TOML = """\
# The settings of one run. `diloco config show --config run.toml --origin` shows all of them, and their sources.
# Later wins: defaults, this file, variables such as DILOCO_SYNC__QUORUM, --set sync.quorum=2, options.

[run]
id = "{run}"                # learners and shards of other runs are refused
tokens = 200_000            # the run ends after this many merged tokens; text such as "2M" also works

[sync]
fragments = 4               # parts of the model, each synchronized on its own
quorum = 1                  # contributions that let a round close

[cluster]                   # only for `diloco up`, which trains the built-in model
shards = 2
workers = 2
"""

TRAIN_PY = '''\
"""A model of your own in a loop of your own. It joins the run of run.toml, on as many machines as you like.

    diloco-server --config run.toml --listen 127.0.0.1:50051 &
    python train.py 127.0.0.1:50051
    kill %1                      # the shard serves the model until it is told to end
"""

import sys

import torch
from torch import nn

import diloco_worker


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two spirals, and the spiral of each point. Put your own data here."""
    label = torch.randint(0, 2, (size,), generator=generator)
    angle = 6 * torch.rand(size, generator=generator) + 0.5
    turn = angle + torch.pi * label
    points = torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 6
    return points + 0.02 * torch.randn(size, 2, generator=generator), label


def main(shards: str) -> None:
    # Put your own model and optimizer here.
    model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with diloco_worker.join(shards, model, run="{run}") as learner:
        generator = torch.Generator().manual_seed(learner.seed)  # every learner draws its own data
        while not learner.done:
            points, label = batch(256, generator)
            loss = nn.functional.cross_entropy(model(points), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(points), loss=loss)  # never waits for the network
        learner.finish()  # the model now holds the values of the run, the same in all learners

    points, label = batch(4096, torch.Generator().manual_seed(0))
    accuracy = (model(points).argmax(1) == label).float().mean()
    print(f"{{learner.learner_id}}: {{100 * accuracy:.1f}} % of held-out points on the right spiral")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
'''


def init(folder: Annotated[Path, Parameter(metavar="FOLDER", help="its name becomes run.id")], /) -> int:
    """Create a folder to start from: run.toml, the settings of a run with explanations, and train.py, a training loop
    with its own model that joins the run. Both work as they are."""
    run = re.sub(r"[^A-Za-z0-9._-]", "-", folder.resolve().name)[:64] or "local"
    files = {"run.toml": RUN_TOML.format(run=run), "train.py": TRAIN_PY.format(run=run)}
    for name in files:
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} is there already; name another folder")
    with disk_errors(ConfigError, NOT_WRITTEN):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    there = shlex.quote(str(folder))
    print(
        f"{folder}: run.toml and train.py\n"
        f"go there:                cd {there}\n"
        f"try the built-in model:  diloco up --config run.toml    # and, from another terminal: diloco status\n"
        f"train your own:          diloco-server --config run.toml --listen 127.0.0.1:50051 &\n"
        f"                         python train.py 127.0.0.1:50051\n"
        f"                         kill %1    # ends the shard; until then it serves the model"
    )
    return 0


def resume(
    folder: Annotated[Path, Parameter(metavar="FOLDER", help="folder of an earlier `diloco up`")] = Path("runs/local"),
    /,
    *,
    shards: Annotated[
        str | None,
        Parameter(metavar="M", help="new number of shards (cluster.shards)", show_default="as before"),
    ] = None,
    workers: Annotated[
        str | None, Parameter(metavar="N", help="new number of workers (cluster.workers)", show_default="as before")
    ] = None,
    tokens: Annotated[
        str | None,
        Parameter(metavar="N", help="end after this many merged tokens (run.tokens)", show_default="as before"),
    ] = None,
    set: Annotated[
        list[str] | None, Parameter(metavar="SECTION.KEY=VALUE", help="one setting; may be repeated")
    ] = None,
) -> int:
    """Continue the run in a folder with its earlier settings, which need not be given again.

    With another number of shards, every fragment is first written to the data folders of the new ones, bit for bit. The
    old ones are kept.
    """
    flags = {"cluster.shards": shards, "cluster.workers": workers, "run.tokens": tokens}
    folder = folder.absolute()
    saved = folder / "settings.json"
    if not saved.exists():
        raise DataError(
            f"{shown(folder)} holds no run of `diloco up` (there is no {saved.name}); begin one: diloco up --folder "
            f"{shown(folder)}"
        )
    is_on_ray = ClusterFolder(folder, Outputs()).is_on_ray
    data = None if is_on_ray else anchored(load_saved(saved).settings).shard.data_dir
    files = ClusterFolder(folder, Outputs(), data)
    with files.owned():
        settle(files)
        before = load_saved(saved).settings
        mine = anchored(settings_from(SettingsOptions(set=set or [], settings=saved), flags))
        mine = mine.model_copy(update={"cluster": mine.cluster.model_copy(update={"folder": folder})})
        check_cluster(mine)
        files.check(mine.model_copy(update={"cluster": before.cluster}))
        if not files.holds_versions:
            raise BadCheckpoint(
                f"the run of {shown(folder)} has no versions in {shown(files.data)}, so there is nothing "
                "to continue. If its shard.data_dir is relative, go to where `diloco up` was started; to start anew: "
                f"diloco up --folder {shown(folder)} --fresh"
            )
        if mine.cluster.shards != before.cluster.shards:
            print(place_anew(files, mine))
    return (bring_up_on_ray if is_on_ray else bring_up)(mine, Outputs())


def scale(
    *,
    workers: Annotated[str, setting("cluster.workers", "N", "new number of workers")],
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder of the cluster that `diloco up` runs")
    ] = None,
    config: Config = None,
) -> int:
    """Change the number of workers of a running `diloco up`. New ones join within seconds; those with the highest
    numbers leave cleanly, and their pushed work is merged."""
    wanted = settings_from(SettingsOptions(config), {"cluster.folder": folder, "cluster.workers": workers}).cluster
    return scale_to(wanted.folder, wanted.workers)
