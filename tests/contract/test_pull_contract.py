"""`diloco pull` as a person types it, against real shards: what is in the folder, and what is said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from in_process import settings_with
from safetensors.torch import load_file, save_file
from torch import nn

import diloco_worker
from diloco_common.command import main
from diloco_common.errors import ManifestMismatch
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_common.wire.addresses import write_address
from diloco_worker.core.shared_set import as_module

EXACT = {"push": "float32", "pull": "float32", "quorum": 1}


class Tied(nn.Module):
    """An embedding that is the head as well, a frozen layer of more than 64 KiB, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(7, 4)
        self.base = nn.Linear(128, 129).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.tensor([2.0]))


def trained(shards: str, model: Any) -> Any:
    """It joined, trained a little, and holds the final model."""
    with diloco_worker.join(shards, model, learner_id="a", wait_s=20) as learner:
        while not learner.done:
            with torch.no_grad():
                for parameter in as_module(model).parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.01 * torch.randn_like(parameter))
            learner.step(tokens=8)
        assert learner.finish()
    return model


@pytest.fixture
def addresses(serve) -> str:
    shards = [
        serve(settings_with(run={"tokens": 80}, sync=EXACT | {"fragments": 2}, shard={"index": i, "count": 2}))
        for i in range(2)
    ]
    return ",".join(shard.address for shard in shards)


def test_the_model_is_written_under_all_of_its_names(addresses, tmp_path, capsys):
    model = trained(addresses, nn.Sequential(Tied(), nn.Linear(3, 2)))
    out = tmp_path / "out"
    command = ["pull", "--shards", addresses, "--out", str(out)]
    assert main(command) == 3
    assert "0.base.bias, 0.base.weight, which the run does not have" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--partial"]) == 0

    found = load_file(out / "model.safetensors")
    expected = {name: p for name, p in model.state_dict().items() if not name.startswith("0.base")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    said = capsys.readouterr().out
    assert f"{out}/model.safetensors: 36 parameters as float32" in said
    assert "of 3 fragments" in said, "one of them is of the buffer"


def test_a_reader_gets_newer_versions_as_they_come_and_the_final_model_last(addresses):
    read, every = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), addresses.split(",")
    model, found = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), list[Any]()
    with diloco_worker.join(addresses, model, learner_id="a", wait_s=20) as learner, ThreadPoolExecutor(1) as thread:
        reader = thread.submit(lambda: found.extend(diloco_worker.versions(every, nn.DataParallel(read))))
        while not learner.done:
            with torch.no_grad():
                model[0].weight.add_(0.01 * torch.randn_like(model[0].weight))
            model(torch.randn(4, 3))
            learner.step(tokens=8)
        assert learner.finish()
        learner.leave()
        reader.result(timeout=60)
    before = [one.version for one in found if not one.is_final]
    assert sorted({*before}) == before, "each is newer"
    assert found[-1].is_final
    pulled = diloco_worker.pull_global_model(every)
    assert all(torch.equal(values, pulled.tensors[key]) for key, values in read.state_dict().items())
    assert torch.equal(read[0].weight, model[0].weight)


def test_a_folder_for_every_version_is_marked_when_it_is_whole_and_old_ones_go(addresses, tmp_path, capsys):
    command = ["pull", "--shards", addresses, "--out", str(tmp_path), "--each", "1", "--keep", "2"]
    model = nn.Linear(3, 2)
    with ThreadPoolExecutor(1) as thread, ExitStack() as stack:
        reader = thread.submit(main, [*command, "--wait", "60"])  # before anybody has joined
        learner = stack.enter_context(diloco_worker.join(addresses, model, learner_id="a", wait_s=20))
        while not learner.done:
            with torch.no_grad():
                model.weight.add_(0.01 * torch.randn_like(model.weight))
            learner.step(tokens=1)
        assert learner.finish()
        learner.leave()
        assert reader.result(timeout=60) == 0
    folders = sorted(tmp_path.iterdir())
    assert 1 <= len(folders) <= 2
    assert all({path.name for path in folder.iterdir()} == {"model.safetensors", "DONE"} for folder in folders)
    assert torch.equal(load_file(folders[-1] / "model.safetensors")["weight"], model.weight)
    assert main([*command[:-2], "--average"]) == main([*command[:5], "--keep", "2"]) == 2
    assert "leave out --average" in capsys.readouterr().err
    assert main(command) == 3, "what is there would be taken for the newest"


@pytest.mark.parametrize("other", [nn.Linear(3, 3), nn.Linear(3, 2, bias=False), nn.Sequential(nn.Linear(3, 2))])
def test_a_reader_with_another_model_is_told_by_name(addresses, other):
    trained(addresses, nn.Linear(3, 2))
    with pytest.raises(ManifestMismatch, match=r"^(0\.)?(bias|weight) of this module differs"):
        next(diloco_worker.versions(addresses.split(","), other))


def test_shards_and_run_are_those_of_the_folder_of_a_cluster(addresses, tmp_path, capsys):
    model, cluster = trained(addresses, nn.Linear(3, 2)), tmp_path / "cluster"
    (cluster / "run").mkdir(parents=True)
    save(Settings(), cluster / "settings.json")
    for i, address in enumerate(addresses.split(",")):
        write_address(cluster / "run" / f"shard-{i}.json", "shard", f"shard-{i}", grpc=address, http="")
    write_address(cluster / "run" / "worker-0.json", "worker", "worker-0", http="")

    assert main(["pull", "--folder", str(cluster), "--out", str(tmp_path)]) == 0
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)
    main(["doctor", "--folder", str(cluster)])
    assert "all 2 shards of the run were reached" in capsys.readouterr().out, (
        "these have no HTTP to ask about the cluster"
    )


def test_what_the_run_does_not_train_comes_from_the_folder_of_the_model(addresses, tmp_path):
    config, out = tmp_path / "config", tmp_path / "out"
    config.mkdir()
    begun = {name: values.clone() for name, values in Tied().state_dict().items()}
    save_file(begun, config / "model.safetensors")
    (config / "config.json").write_text("{}")
    (config / "tokenizer.json").write_text('{"a": 1}')
    (config / "optimizer.pt").write_text("not for others")
    model = trained(addresses, nn.Sequential(Tied(), nn.Linear(3, 2))[0])

    assert main(["pull", "--shards", addresses, "--out", str(out), "--base", str(config), "--dtype", "bfloat16"]) == 0

    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    found = load_file(out / "model.safetensors")
    assert found["wte.weight"].dtype == torch.bfloat16
    assert torch.equal(found["head.weight"], model.wte.weight.detach().bfloat16())
    assert torch.equal(found["scale"], begun["scale"])
    model.load_state_dict({name: values.float() for name, values in found.items()})  # strict: all names are there


class Around(nn.Module):
    """As a LightningModule keeps a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


BASE = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
"""What a linear layer began with."""


@pytest.mark.parametrize(
    ("made", "base", "flags", "says"),
    [
        (nn.Linear(3, 2), BASE, [], ""),
        (Around(Around(nn.Linear(3, 2))), BASE, [], ""),
        ({"policy": nn.Linear(3, 2)}, BASE, [], ""),
        (nn.Linear(3, 2), BASE | {"scale": torch.zeros(1)}, [], ""),
        ({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}, BASE, ["--partial"], "several times, under 'a.' and 'b.'"),
        ({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}, BASE, ["--strip", "b."], "has no place for a.bias"),
        ({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}, BASE, ["--strip", "b.", "--partial"], ""),
        (nn.Linear(3, 2), {"bias": BASE["bias"]}, [], "has no place for weight, of the run"),
        (nn.Linear(3, 2), BASE | {"weight": torch.zeros(2, 4)}, [], "weight [2, 4], not [2, 3]"),
    ],
    ids=["as it is", "in modules", "in a dict", "more in the base", "two", "one", "one of two", "less", "shapes"],
)
def test_every_tensor_finds_its_place_in_the_base_or_is_named(addresses, tmp_path, capsys, made, base, flags, says):
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base/net.safetensors")
    linear = list(as_module(trained(addresses, made)).modules())[-1]
    command = ["pull", "--shards", addresses, "--out", str(tmp_path / "out"), "--base", str(tmp_path / "base"), *flags]
    assert main(command) == (3 if says else 0)
    if says:
        assert says in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        return
    found = load_file(tmp_path / "out/net.safetensors")
    assert found.keys() == base.keys()
    assert torch.equal(found["weight"], linear.weight)


def test_shards_that_start_again_and_files_know_the_names(serve, tmp_path):
    kept = settings_with(run={"tokens": 80}, sync=EXACT, shard={"data_dir": tmp_path / "data"})
    shard = serve(kept)
    model = trained(shard.address, Tied())
    shard.stop()
    again = serve(kept)
    assert main(["pull", "--shards", again.address, "--out", str(tmp_path / "pulled"), "--partial"]) == 0
    out = tmp_path / "exported.safetensors"
    assert main(["export", str(tmp_path / "data"), "--out", str(out)]) == 3
    assert main(["export", str(tmp_path / "data"), "--out", str(out), "--partial"]) == 0
    for found in (load_file(tmp_path / "pulled/model.safetensors"), load_file(out)):
        assert found.keys() == {"head.weight", "wte.weight", "scale"}
        assert torch.equal(found["wte.weight"], model.wte.weight)
