"""`diloco checkpoint`, `restore` and `export` as a person types them, on data folders without processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco_common.command import main
from diloco_common.settings import Settings
from diloco_common.settings_loader import load, load_saved
from diloco_common.settings_loader import save as save_settings
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_deploy.checkpoint.sources import open_whole
from diloco_deploy.checkpoint.work import model_in
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.store import FileStore
from diloco_server.storage.version_file import Origin
from stores import LONG_AGO, make_version

TENSORS = [TensorSpec("head.weight", (21, 100)), TensorSpec("layer.0.weight", (10, 140)), TensorSpec("norm", (700,))]
MODEL = cut(TENSORS, 6, 2)
"""Six fragments of 700 elements."""


def save(folder: Path, *versions: int, run: str = "trial") -> None:
    for index in range(2):
        store = FileStore(
            Disk(folder / f"shard-{index}"), Origin(run, index, 2, 6, "nesterov", "int8"), first_epoch=LONG_AGO
        )
        store.recover()
        for fragment in MODEL.owned_by(index):
            for version in versions:
                made = make_version(version, fragment_id=fragment.fragment_id, sends_changes=True)
                store.save(made, MODEL)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    save(folder, 1, 2)
    return folder


def expected_model(version: int) -> dict[str, torch.Tensor]:
    """What the fragments of a version make together."""
    model = {spec.name: torch.full(spec.shape, torch.nan) for spec in TENSORS}
    for fragment in MODEL.fragments:
        theta = make_version(version, fragment_id=fragment.fragment_id).values.theta
        for piece in fragment.pieces:
            rows = model[piece.tensor].view(-1)[piece.tensor_offset :][: piece.num_elements]
            rows.copy_(theta[piece.offset :][: piece.num_elements])
    return model


def assert_same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_take_list_verify_restore_and_export(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", str(run_folder), "--name", "one"]) == 0
    assert "6 of 6 fragments, version 2" in capsys.readouterr().out
    checkpoint = run_folder / "checkpoints" / "one"
    save(run_folder, 3, 4)

    assert main(["checkpoint", "list", str(run_folder), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["paths"], entry["state"], entry["versions"]) == ([str(checkpoint)], "whole", [2, 2])
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0

    for shards in (1, 3):
        new = run_folder.parent / f"on-{shards}"
        assert main(["restore", str(checkpoint), "--shards", str(shards), "--folder", str(new)]) == 0
        said = capsys.readouterr().out
        assert f"diloco up --folder {new} --shards {shards} --set run.id=trial --set sync.fragments=6" in said
        assert main(["export", str(new), "--out", str(new / "model.safetensors")]) == 0
        assert_same(new / "model.safetensors", expected_model(2))
    assert main(["export", str(checkpoint), "--out", str(run_folder / "a.safetensors")]) == 0
    assert_same(run_folder / "a.safetensors", expected_model(2))
    out = run_folder / "b.safetensors"
    assert main(["export", str(run_folder), "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert_same(out, {name: tensor.bfloat16() for name, tensor in expected_model(4).items()})


def test_what_a_running_shard_has_removed_is_read_in_a_newer_version(run_folder: Path) -> None:
    whole = open_whole([str(run_folder)])
    save(run_folder, 3, 4)
    found, expected = model_in(whole), expected_model(4)
    assert set(found.versions.values()) == {4}
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.items())


def test_the_line_to_go_on_with_holds_no_command_of_whoever_made_the_checkpoint(tmp_path, capsys) -> None:
    save(tmp_path / "theirs", 1, run="x; touch y")
    new = tmp_path / "a new one"
    assert main(["restore", str(tmp_path / "theirs"), "--shards", "1", "--folder", str(new)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith(f"diloco up --folder '{new}' --shards 1 --set 'run.id=x; touch y' --set sync.fragments=6")


def test_parts_of_two_checkpoints_are_refused_and_may_be_made_one_on_purpose(run_folder, capsys) -> None:
    """Shard 0 at version 2; shard 1 at version 3, as may be while a run goes on, and at version 4."""
    shards = [run_folder / "shard-0", run_folder / "shard-1"]
    old = str(shards[0] / "checkpoints" / "a")
    assert main(["checkpoint", str(shards[0]), "--name", "a"]) == 0
    for version, exit_code in ((3, 0), (4, 3)):
        save(run_folder, version)
        part = str(run_folder / f"part-{version}")
        assert main(["checkpoint", str(shards[1]), "--into", str(run_folder), "--name", f"part-{version}"]) == 0
        capsys.readouterr()
        for words in (["checkpoint", "verify"], ["export", "--out", str(run_folder / "m.safetensors")]):
            assert main([*words, old, part]) == exit_code
    said = capsys.readouterr().err
    assert f"{old} ends at version 2 and {part} begins at 4, so they belong to two checkpoints" in said

    assert main(["checkpoint", old, part, "--into", str(run_folder), "--name", "whole"]) == 0
    assert "6 of 6 fragments, versions 2 to 4" in capsys.readouterr().out
    assert main(["restore", str(run_folder / "whole"), "--shards", "3", "--folder", str(run_folder.parent / "n")]) == 0


def test_damage_is_named_and_ends_with_exit_code_3(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["checkpoint", str(run_folder), "--name", "one"])
    checkpoint = run_folder / "checkpoints" / "one"
    path = sorted(checkpoint.glob("fragment-0003-*"))[0]
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    capsys.readouterr()

    assert main(["checkpoint", "verify", str(checkpoint)]) == 3
    said = capsys.readouterr().err
    assert said.count("BAD_CHECKPOINT") == 1
    assert path.name in said
    new = run_folder.parent / "new"
    assert main(["restore", str(checkpoint), "--shards", "2", "--folder", str(new)]) == 3
    assert f"{path} is damaged: " in (said := capsys.readouterr().err), "of several folders it is this one"
    assert "name another checkpoint" in said
    assert not new.exists()
    assert main(["export", str(checkpoint), "--out", str(run_folder / "m.safetensors")]) == 3
    assert f"{path} is damaged: " in capsys.readouterr().err
    assert not (run_folder / "m.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        (["checkpoint", "{run}", "--name", "one"], 3, "BAD_CHECKPOINT"),
        (["checkpoint", "{run}", "--name", "../up"], 2, "BAD_CONFIG"),
        (["checkpoint", "{run}/checkpoints"], 3, "BAD_CHECKPOINT"),
        (["checkpoint", "verify", "{run}/shard-0"], 3, "BAD_CHECKPOINT"),
        (["checkpoint", "copy", "{run}/checkpoints/one", "ftp://host/path"], 2, "BAD_CONFIG"),
        (["restore", "{run}/checkpoints/one", "--shards", "9", "--folder", "{run}/new"], 2, "BAD_CONFIG"),
        (["restore", "{run}/checkpoints/one", "--shards", "2", "--folder", "{run}"], 2, "BAD_CONFIG"),
        (["restore", "{run}/shard-0", "--shards", "2", "--folder", "{run}/new"], 3, "BAD_CHECKPOINT"),
        (["export", "{run}/shard-1", "--out", "{run}/m.safetensors"], 3, "BAD_CHECKPOINT"),
        (["export", "{run}", "--out", "/dev/null/m.safetensors"], 3, "BAD_DATA"),
        (["restore", "{run}", "{run}", "--shards", "2", "--folder", "{run}/new"], 3, "BAD_CHECKPOINT"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(run_folder, capsys, words, exit_code, code) -> None:
    main(["checkpoint", str(run_folder), "--name", "one"])
    capsys.readouterr()
    before = sorted(run_folder.rglob("*"))

    assert main([word.format(run=run_folder) for word in words]) == exit_code

    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith(f"[{code}]\n")
    assert sorted(run_folder.rglob("*")) == before, "something is left"


def test_a_run_goes_on_with_another_number_of_shards_bit_for_bit(run_folder, monkeypatch, capsys) -> None:
    """And with the settings that it had, whatever is typed this time."""
    had = load(None, {}, ["run.id=trial", "sync.fragments=6", f"cluster.folder={run_folder}"]).settings
    save_settings(had, run_folder / "settings.json")
    (run_folder / "worker-0").mkdir()
    ups: list[Settings] = []
    monkeypatch.setattr("diloco_deploy.run.commands.bring_up", lambda settings, outputs: ups.append(settings) or 0)

    assert main(["resume", str(run_folder), "--shards", "3", "--tokens", "4M"]) == 0

    (settings,) = ups
    assert (settings.run.id, settings.cluster.shards, settings.run.tokens) == ("trial", 3, 4_000_000)
    assert "2 -> 3 shards; the earlier folders are in " in capsys.readouterr().out
    (kept,) = run_folder.glob("before-*")
    assert sorted(path.name for path in kept.iterdir()) == ["shard-0", "shard-1", "worker-0"]
    assert sorted(path.name for path in run_folder.glob("shard-*")) == ["shard-0", "shard-1", "shard-2"]
    out = run_folder / "m.safetensors"
    assert main(["export", str(run_folder), "--out", str(out)]) == 0
    assert_same(out, expected_model(2))


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where runs were gone on with: "here" or "ray"."""
    ups: list[str] = []
    monkeypatch.setattr("diloco_deploy.run.commands.bring_up", lambda settings, outputs: ups.append("here") or 0)
    monkeypatch.setattr("diloco_deploy.run.commands.bring_up_on_ray", lambda settings, outputs: ups.append("ray") or 0)
    return ups


def save_run(folder: Path, *overrides: str) -> None:
    had = load(None, {}, ["run.id=trial", "sync.fragments=6", f"cluster.folder={folder}", *overrides]).settings
    save_settings(had, folder / "settings.json")
    (folder / "worker-0").mkdir()


def test_the_identity_of_a_run_is_checked_before_its_shards_move(run_folder, resumed, capsys) -> None:
    save_run(run_folder)
    assert main(["resume", str(run_folder), "--shards", "3", "--set", "run.seed=5"]) == 2
    assert "run.seed: 0 <-> 5" in capsys.readouterr().err
    assert sorted(path.name for path in run_folder.glob("shard-*")) == ["shard-0", "shard-1"]
    assert main(["resume", str(run_folder), "--shards", "3"]) == 0
    assert resumed == ["here"]


class Killed(BaseException):
    """As SIGKILL: nothing after it is run."""


@pytest.mark.parametrize("renames", range(9))
def test_a_kill_between_any_two_renames_leaves_a_run_to_go_on_with(run_folder, resumed, renames, monkeypatch) -> None:
    """Renames: of what was restored, of two old shards, of three new ones, and of those that are kept. Workers have
    another folder than the shards, as on another disk: no rename goes from one to the other."""
    cluster = run_folder.parent / "cluster"
    cluster.mkdir()
    save_run(cluster, f"shard.data_dir={run_folder}")
    left, rename = iter(range(renames)), Path.rename

    def perhaps(path: Path, target: Path) -> Path:
        assert (run_folder in path.parents) == (run_folder in Path(target).parents), "across disks"
        if next(left, None) is None:
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", perhaps)
        patch.setattr("diloco_server.storage.folders.shutil.rmtree", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            main(["resume", str(cluster), "--shards", "3"])

    assert main(["resume", str(cluster)]) == 0
    shards = load_saved(cluster / "settings.json").settings.cluster.shards
    assert len(list(run_folder.glob("shard-*"))) == shards
    assert not list(run_folder.glob("placing-anew*"))
    assert (cluster / "worker-0").exists() == (shards == 2), "a worker's checkpoint is of the shards that it had"
    out = run_folder / "m.safetensors"
    assert main(["export", str(cluster), "--out", str(out)]) == 0
    assert_same(out, expected_model(2))
    assert main(["resume", str(cluster), "--shards", "3"]) == 0
