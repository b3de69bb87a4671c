"""The average of the versions, as `diloco pull` and a loop get it from two shards."""

from __future__ import annotations

import pytest
import torch
from in_process import settings_with
from safetensors.torch import load_file
from torch import Tensor, nn
from training import EXACT

import diloco_worker
from diloco_common.command import main
from diloco_common.errors import NoAverage, WrongCall
from diloco_worker.global_model import lay_out
from waiting import until


def served(serve, average: float) -> list:
    sync, outer = EXACT | {"fragments": 2}, {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5, "average": average}
    return [serve(settings_with(sync=sync, outer=outer, shard={"index": i, "count": 2})) for i in range(2)]


def trained(learner, model: nn.Module, shards: list) -> None:
    """Until every fragment of the model has five versions and nothing is under way."""

    def stepped() -> bool:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        learner.step(tokens=8)
        return all(s.version >= 5 for shard in shards for s in shard.core.versions.of_model)

    until(stepped, "five versions of every fragment")
    until(lambda: not any(is_under_way(learner, s) for shard in shards for s in shard.core.fragments.values()), "rest")


def is_under_way(learner, state) -> bool:
    """Whether another version will come without another step."""
    taken = learner.core.fragments[state.fragment.fragment_id].contribution
    return state.computing or (taken is not None and taken.round > state.version)


def of_shards(shards: list, model: nn.Module, what: str) -> dict[str, Tensor]:
    tensors = {name: torch.empty_like(values) for name, values in model.state_dict().items()}
    for shard in shards:
        for state in shard.loop.look(lambda core=shard.core: list(core.fragments.values())):
            values = state.values.averaged() if what == "average" else state.values.theta
            lay_out(values, state.fragment, tensors)
    return tensors


def test_both_get_what_the_shards_have(serve, tmp_path, capsys, caplog) -> None:
    shards, model = served(serve, 0.9), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    addresses = ",".join(shard.address for shard in shards)
    with diloco_worker.join(addresses, model, learner_id="a", wait_s=20) as learner:
        trained(learner, model, shards)
        local = {name: values.clone() for name, values in model.state_dict().items()}
        average, theta = (of_shards(shards, model, what) for what in ("average", "theta"))
        parameters = {name for name, _ in model.named_parameters()}
        assert not any(torch.equal(average[name], theta[name]) for name in parameters)
        assert all(torch.equal(average[name], theta[name]) for name in average.keys() - parameters), "buffers have none"

        with learner.global_values(average=True):
            assert all(torch.equal(values, average[name]) for name, values in model.state_dict().items())
            with pytest.raises(WrongCall):
                learner.global_values(average=True)
        assert all(torch.equal(values, local[name]) for name, values in model.state_dict().items())

        assert main(["pull", "--shards", addresses, "--out", str(tmp_path), "--average"]) == 0
        assert "average up to version" in capsys.readouterr().out
        found = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(found[name], average[name]) for name in average)
        learner.step(tokens=8)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_run_that_keeps_none_says_which_setting_to_set(serve, tmp_path, capsys) -> None:
    shards, model = served(serve, 0.0), nn.Linear(4, 3)
    addresses = ",".join(shard.address for shard in shards)
    with diloco_worker.join(addresses, model, learner_id="a", wait_s=20) as learner:
        with pytest.raises(NoAverage, match=r"set outer\.average on all shards"):
            learner.global_values(average=True)
        learner.step(tokens=8)  # nothing has happened to the learner
    assert main(["pull", "--shards", addresses, "--out", str(tmp_path / "out"), "--average"]) != 0
    said = capsys.readouterr().err
    assert "outer.average" in said
    assert said.strip().endswith("[NO_AVERAGE]")
    assert not (tmp_path / "out").exists()
