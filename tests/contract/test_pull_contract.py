"""`diloco pull` as a person types it, against real shards: what is in the folder, and what is said."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from in_process import settings_with
from safetensors.torch import load_file, save_file
from torch import nn

import diloco_worker
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_common.wire.addresses import write_address
from diloco_deploy.cli import main

EXACT = {"push": "float32", "pull": "float32", "quorum": 1}


class Tied(nn.Module):
    """An embedding that is the head as well, a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(7, 4)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.tensor([2.0]))


def trained(shards: str, model: nn.Module) -> nn.Module:
    """It joined, trained a little, and holds the final model."""
    with diloco_worker.join(shards, model, learner_id="a", wait_s=20) as learner:
        while not learner.done:
            with torch.no_grad():
                for parameter in model.parameters():
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


def test_shards_and_run_are_those_of_the_folder_of_a_cluster(addresses, tmp_path):
    model, cluster = trained(addresses, nn.Linear(3, 2)), tmp_path / "cluster"
    (cluster / "run").mkdir(parents=True)
    save(Settings(), cluster / "settings.json")
    for i, address in enumerate(addresses.split(",")):
        write_address(cluster / "run" / f"shard-{i}.json", "shard", f"shard-{i}", grpc=address, http="")
    write_address(cluster / "run" / "worker-0.json", "worker", "worker-0", http="")

    assert main(["pull", "--folder", str(cluster), "--out", str(tmp_path)]) == 0
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)
    assert main(["doctor", "--folder", str(cluster)]) == 0


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


def test_another_run_is_one_line(addresses, tmp_path, capsys):
    trained(addresses, nn.Linear(4, 4))
    assert main(["pull", "--shards", addresses, "--out", str(tmp_path), "--run", "another"]) != 0
    said = capsys.readouterr().err.strip()
    assert said.endswith("[WRONG_RUN]")
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_evaluation_of_the_built_in_model_refuses_another_one(addresses, tmp_path):
    trained(addresses, nn.Linear(4, 4))
    out = tmp_path / "model.safetensors"
    command = [sys.executable, "-m", "diloco_demo", "evaluate", "--shards", addresses, "--export", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert "`diloco pull --out DIR` writes it [BAD_CONFIG]" in ended.stderr
    assert not out.exists()
