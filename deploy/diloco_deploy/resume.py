"""Goes on with the run in a folder: with its own settings, and on another number of shards if that is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco_common.errors import DataError, NoCheckpoint
from diloco_common.options import SettingsOptions, settings_from
from diloco_common.settings_loader import load_saved
from diloco_deploy.folder import Files, Outputs, anchored, shown
from diloco_deploy.placing import place_anew, settle
from diloco_deploy.ray_up import bring_up_on_ray
from diloco_deploy.up import bring_up, check_cluster


def resume_run(folder: Path, flags: Mapping[str, object], overrides: Sequence[str]) -> int:
    """Run `diloco up` again on a folder, where it ran before: here or on Ray. The exit code. Raises DilocoError.

    `flags`: settings that are other than before; None: as before.
    """
    folder = folder.absolute()
    saved = folder / "settings.json"
    if not saved.exists():
        raise DataError(
            f"{shown(folder)} holds no run of `diloco up` (there is no {saved.name}); begin one: diloco up --folder "
            f"{shown(folder)}"
        )
    is_on_ray = Files(folder, Outputs()).is_on_ray
    data = None if is_on_ray else anchored(load_saved(saved).settings).shard.data_dir
    files = Files(folder, Outputs(), data)
    with files.owned():
        settle(files)
        before = load_saved(saved).settings
        mine = anchored(settings_from(SettingsOptions(set=list(overrides), settings=saved), flags))
        mine = mine.model_copy(update={"cluster": mine.cluster.model_copy(update={"folder": folder})})
        check_cluster(mine)
        files.check(mine.model_copy(update={"cluster": before.cluster}))
        if not files.holds_versions:
            raise NoCheckpoint(
                f"the run of {shown(folder)} has no versions in {shown(files.data)}, so there is nothing to go on "
                "with. If its shard.data_dir is a relative path, go to where `diloco up` was started; to begin anew: "
                f"diloco up --folder {shown(folder)} --fresh"
            )
        if mine.cluster.shards != before.cluster.shards:
            print(place_anew(files, mine))
    return (bring_up_on_ray if is_on_ray else bring_up)(mine, Outputs())
