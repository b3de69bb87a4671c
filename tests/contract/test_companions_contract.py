"""Averaged momentum and the average of the versions: real learners with real optimizers, and real shards."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from in_process import InProcessShard, settings_with
from safetensors.torch import load_file
from torch import Tensor, nn
from training import EXACT, Training, tiny_model

import diloco_worker
from diloco_common.command import main
from diloco_common.errors import NoAverage, UnsupportedModel, WrongCall
from diloco_deploy.checkpoint import Writing
from diloco_deploy.checkpoint.commands import restore
from diloco_deploy.checkpoint.sources import open_whole
from diloco_deploy.checkpoint.work import model_in
from diloco_deploy.checkpoint.written import write
from diloco_server.storage.checkpoint import decode_manifest, encode_manifest, total_tokens
from diloco_worker.core.momentum import Companion
from diloco_worker.core.replica import Replica
from diloco_worker.global_model import lay_out, pull_global_model
from waiting import until

SYNC = {"push": "float32", "pull": "float32", "quorum": "all", "sync_every": 4, "fragments": 3}


class Averaging(Training):
    """A loop with AdamW whose momentum is averaged; `state`: of model and optimizer."""

    def __init__(self, shards: str, learner_id: str, *, seed: int = 0, saved: Any = None, **options: Any) -> None:
        self.model = tiny_model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if saved is not None:
            self.optimizer.load_state_dict(saved)
        self.generator = torch.Generator().manual_seed(seed)
        options.setdefault("wait_s", 20.0)
        options.setdefault("companions", self.optimizer)
        self.learner = diloco_worker.join(shards, self.model, learner_id=learner_id, **options)

    @property
    def momentum(self) -> Tensor:
        return torch.cat([self.optimizer.state[p]["exp_avg"].flatten() for p in self.model.parameters()])

    @property
    def versions(self) -> list[int]:
        """Of the fragments of companions that it holds."""
        return [f.version for f in self.learner.core.fragments.values() if not f.fragment.traits.is_of_model]


@pytest.fixture
def averaging():
    started: list[Averaging] = []

    def start(*args: Any, **options: Any) -> Averaging:
        started.append(Averaging(*args, **options))
        return started[-1]

    yield start
    for training in started:
        training.learner.close()


def averaged(shard: InProcessShard, model: torch.nn.Module) -> Tensor:
    """The momentum that the shard holds, in the order of the model's parameters."""
    flat = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    for state in shard.loop.look(lambda: list(shard.core.fragments.values())):
        if not state.fragment.traits.is_of_model:
            for piece in state.fragment.pieces:
                of = flat[piece.tensor.removeprefix("momentum of ").removesuffix(" (Adam)")]
                of[piece.tensor_bounds] = state.values.theta[piece.bounds]
    return torch.cat(list(flat.values()))


def until_all_have(version: int, *learners: Averaging) -> None:
    for _ in range(4000):
        if all(min(one.versions) >= version for one in learners):
            return
        for one in learners:
            one.step()
            one.learner.poll(0.002)
    raise AssertionError([one.versions for one in learners])


def bounded(momentum: Tensor, of: Averaging) -> Tensor:
    """What AdamW with its default betas takes over of the momentum of others."""
    second = torch.cat([of.optimizer.state[p]["exp_avg_sq"].flatten() for p in of.model.parameters()])
    most = 0.1 / (0.001 * (1 - 0.81 / 0.999)) ** 0.5 * second.sqrt()
    return momentum.clamp(-most, most)


def test_a_round_leaves_all_learners_with_the_mean_of_their_momentum(serve, averaging):
    shard = serve(settings_with(sync=SYNC | {"fragments": 1}))
    learners = [averaging(shard.address, "a"), averaging(shard.address, "b", seed=1)]
    for version in (1, 2):
        for one in learners:
            for _ in range(SYNC["sync_every"]):  # a round is due once both have taken these
                one.step()
        own = [one.momentum for one in learners]
        assert not torch.allclose(*own)

        def all_have_it(version: int = version) -> bool:
            for one in learners:
                one.learner.poll(0.01)
            return all(one.versions == [version] for one in learners)

        until(all_have_it, f"version {version}")
        shared = averaged(shard, learners[0].model)
        assert shared.norm() <= sum(own).norm() / 2 * 1.0001, "the longer one is cut to the shorter one"
        for one in learners:
            torch.testing.assert_close(one.momentum, bounded(shared, one), rtol=1e-5, atol=1e-7)


def test_who_comes_back_has_the_averaged_momentum_and_so_has_a_shard_that_starts_again(serve, averaging, tmp_path):
    settings = {"sync": SYNC | {"sync_every": 64}, "outer": {"optimizer": "nesterov", "momentum": 0.5}}
    first = serve(settings_with(**settings, shard={"data_dir": str(tmp_path)}))
    a, b = averaging(first.address, "a"), averaging(first.address, "b", seed=1)
    until_all_have(1, a, b)
    a.learner.close()
    b.learner.close()
    shared = averaged(first, a.model)
    assert shared.any()
    saved = a.optimizer.state_dict()
    assert not torch.allclose(a.momentum, shared), "it has trained on since"
    again = averaging(first.address, "a", saved=copy.deepcopy(saved))
    torch.testing.assert_close(again.momentum, bounded(shared, again))
    fresh = averaging(first.address, "c", seed=2)
    assert not fresh.momentum.any(), "AdamW would divide the momentum of others by its eps"

    again.learner.close()
    fresh.learner.close()
    address = first.address
    of_model = first.loop.look(lambda: [s for s in first.core.fragments.values() if s.fragment.traits.is_of_model])
    tokens = min(state.tokens_merged for state in of_model)
    first.stop()
    _check_files(tmp_path, a.model, tokens)
    second = serve(settings_with(**settings, shard={"data_dir": str(tmp_path), "listen": address}))
    assert torch.equal(averaged(second, a.model), shared)
    states = second.loop.look(lambda: list(second.core.fragments.values()))
    assert [(s.fragment.kind, len(s.values.buffers)) for s in states] == [("parameter", 1)] * 3 + [("momentum", 0)] * 3

    found = pull_global_model([second.address])
    assert found.tensors.keys() == dict(a.model.named_parameters()).keys(), "who reads the model sees no momentum"
    assert sorted(found.versions) == [0, 1, 2]


def _check_files(folder: Path, model: torch.nn.Module, tokens: int) -> None:
    """What is read from a data folder, and from one for another number of shards."""
    whole = open_whole([str(folder)])
    manifest = whole.contents.manifest
    assert whole.contents.tensors == tuple(
        sorted(Replica(model, companions={n: Companion("Adam", p.detach()) for n, p in model.named_parameters()}).specs)
    )
    behind = tuple(
        file if manifest.fragments[file.fragment_id].traits.is_of_model else replace(file, tokens_merged=0)
        for file in whole.contents.files
    )
    assert total_tokens(replace(whole.contents, files=behind)) == total_tokens(whole.contents) == tokens
    write(model_in(whole), Writing(folder / "model.safetensors"))
    assert load_file(folder / "model.safetensors").keys() == dict(model.named_parameters()).keys()
    restore([str(folder)], shards=2, folder=folder / "two")
    split = open_whole([str(folder / "two" / f"shard-{i}") for i in range(2)]).contents.manifest
    assert {f.shard_index for f in split.fragments if not f.traits.is_of_model} == {0, 1}
    assert decode_manifest(encode_manifest(whole.contents), "here") == whole.contents


def test_finish_leaves_the_model_of_the_run_and_waits_for_no_companion(serve, averaging):
    shard = serve(settings_with(sync=SYNC, run={"tokens": 400}))
    a, b = averaging(shard.address, "a"), averaging(shard.address, "b", seed=1)
    for _ in range(4000):
        if a.learner.done and b.learner.done:
            break
        for one in (a, b):
            if not one.learner.done:
                one.step()
                one.learner.poll(0.002)
    assert a.learner.finish()
    assert b.learner.finish()
    assert torch.equal(a.values(), b.values())


def test_an_island_is_told_that_it_cannot_yet(serve, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr("diloco_worker.joining.is_together", lambda island: True)
    monkeypatch.setattr("diloco_worker.joining.IslandGroup", Mock())
    with pytest.raises(UnsupportedModel, match="an island cannot average its momentum yet"):
        diloco_worker.join("127.0.0.1:9", model, companions=torch.optim.AdamW(model.parameters()))


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
