"""Models that several processes train together are refused before anything is sent, with the real wrappers of torch."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from in_process import settings_with
from ranks import fsdp1, plain
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import diloco_worker
from diloco_common.errors import CannotConnect, UnsupportedModel
from diloco_common.wire.manifest import cut
from diloco_worker.core.parts import Seat, located
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import SharedSet
from diloco_worker.shell.island import IslandGroup
from waiting import DEADLINE_S

ONE_PROCESS = "one process per device without torchrun"


def fsdp2() -> nn.Module:
    return fully_shard(plain(), mesh=init_device_mesh("cpu", (1,)))


def row_parallel() -> nn.Module:
    """Sharded by columns."""
    return fully_shard(plain(), mesh=init_device_mesh("cpu", (1,)), shard_placement_fn=lambda p: Shard(p.dim() - 1))


def tensor_parallel() -> nn.Module:
    return parallelize_module(plain(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})


def zero() -> nn.Module:
    """What DeepSpeed ZeRO-3 leaves of a model: empty parameters with attributes of its own."""
    model = plain()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = torch.empty(0)
        parameter.ds_id = i
    return model


class DeepSpeedEngine(nn.Module):
    """Called as the real one, which is not installed here."""

    def __init__(self) -> None:
        super().__init__()
        self.module = plain()


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def nobody_hears() -> Iterator[str]:
    """The address of a server that must not be called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def why_not(model: nn.Module, **options: object) -> str:
    """How `join` refuses a model, while nothing is sent."""
    with nobody_hears() as shards, pytest.raises(UnsupportedModel) as refused:
        diloco_worker.join(shards, model, wait_s=1.0, **options)
    return str(refused.value)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("make", "cause"),
    [
        pytest.param(lambda: DistributedDataParallel(plain()), "the model is wrapped in Distrib", id="DDP"),
        pytest.param(lambda: nn.Sequential(DistributedDataParallel(plain())), "0 is wrapped in Distri", id="part"),
        pytest.param(lambda: torch.compile(DistributedDataParallel(plain())), "is wrapped in Distribu", id="compiled"),
        pytest.param(fsdp1, "the model is wrapped in FullyShardedDataParallel (FSDP1)", id="FSDP1"),
        pytest.param(
            lambda: fsdp1().module, "_flat_param is flattened by FullyShardedDataParallel", id="FSDP1, inside"
        ),
        pytest.param(lambda: fsdp1(use_orig_params=True).module, "0.weight is flattened by", id="FSDP1, its own names"),
        pytest.param(fsdp2, "the model is wrapped in fully_shard (FSDP2)", id="FSDP2"),
        pytest.param(tensor_parallel, "0.weight is a DTensor", id="tensor parallelism"),
        pytest.param(zero, "0.weight is partitioned by DeepSpeed ZeRO", id="ZeRO"),
        pytest.param(DeepSpeedEngine, "the model is wrapped in DeepSpeed", id="DeepSpeed"),
    ],
)
@pytest.mark.parametrize("island", [None, "alone"])
def test_a_model_that_is_made_for_several_processes_is_refused(
    make: Callable[[], nn.Module], cause: str, island: str | None
) -> None:
    why = why_not(make(), island=island)
    assert cause in why
    assert ONE_PROCESS in why


@pytest.mark.usefixtures("group")
def test_a_process_group_of_one_is_a_process_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")  # the group knows better
    joins(plain())


def joins(model: nn.Module, **options: object) -> None:
    """It gets as far as looking for shards, where there are none."""
    with pytest.raises(CannotConnect):
        diloco_worker.join("127.0.0.1:9", model, wait_s=0.0, **options)


def test_several_processes_are_refused_unless_each_of_them_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    why = why_not(plain())
    assert "one of 8 (RANK and WORLD_SIZE are set, as by torchrun)" in why
    assert 'join(..., island="alone")' in why
    joins(plain(), island="alone")


def test_the_other_ranks_end_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    why = why_not(plain())
    assert why.startswith("rank 3 of 8 ends: ")
    assert len(why) < 100


@pytest.mark.parametrize(("rank", "size"), [("0", "1"), ("", "2"), ("0", "")])
def test_one_process_is_not_several(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    joins(plain())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("make", "cause"),
    [
        pytest.param(fsdp1, "(FSDP1), and islands take DistributedDataParallel and fully_shard", id="FSDP1"),
        pytest.param(zero, "0.weight is partitioned by DeepSpeed ZeRO, and islands take", id="ZeRO"),
        pytest.param(DeepSpeedEngine, "is wrapped in DeepSpeed, and islands take", id="DeepSpeed"),
        pytest.param(tensor_parallel, "0.weight is a DTensor, of fully_shard (FSDP2) or of tensor par", id="TP"),
        pytest.param(row_parallel, "a parameter is S(1) on its device mesh; islands take", id="Shard(1)"),
    ],
)
def test_an_island_takes_ddp_and_fsdp2_and_nothing_else(make: Callable[[], nn.Module], cause: str) -> None:
    assert cause in why_not(make(), island=dist.group.WORLD)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [plain, fsdp2, lambda: DistributedDataParallel(plain())])
def test_a_model_of_an_island_has_the_names_and_shapes_that_it_has_alone(make: Callable[[], nn.Module]) -> None:
    group = IslandGroup(dist.group.WORLD)
    assert group.replica(SharedSet(make()), None).specs == Replica(plain()).specs


@pytest.mark.usefixtures("group")
def test_all_parameters_of_an_island_are_spread_in_one_way() -> None:
    """Two ranks, of which each holds all of one layer, and rows of the other: how would they share out a fragment?"""
    model = plain()
    fully_shard(model[2], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedModel, match=r"0.bias and 2.bias are spread over the ranks in different ways"):
        Replica(model, seat=Seat(0, 2, located))


@pytest.mark.usefixtures("group")
def test_values_that_are_written_are_seen_after_a_forward_pass_without_gradients() -> None:
    """The root module of FSDP2 stays gathered after one: what is written to its rows is not seen unless resharded."""
    model = fsdp2()
    group = IslandGroup(dist.group.WORLD)
    replica = group.replica(SharedSet(model), None)
    (fragment,) = cut(replica.specs, 1, 1).fragments
    with torch.no_grad():
        before = model(torch.ones(1, 4))
        put_back = replica.keep()
        replica.write(replica.held(fragment), torch.zeros(fragment.num_elements))
        assert model(torch.ones(1, 4)).abs().max() == 0.0
        put_back()
        assert torch.equal(model(torch.ones(1, 4)), before)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_is_told_the_cause_by_whichever_rank_ends_first(monkeypatch, tmp_path, rank: str) -> None:
    """It ends the other ranks at once, and shows this file last of all."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    why_not(plain())
    said = json.loads((tmp_path / "error.json").read_text())["message"]
    assert ONE_PROCESS in said["message"]
    assert ONE_PROCESS in said["extraInfo"]["py_callstack"]


# ------------------------------------------------------------------ two real ranks


def torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of ranks.py, on gloo."""
    script = Path(__file__).with_name("ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)


def test_two_ranks_of_one_model_are_refused_and_torchrun_ends_with_the_cause() -> None:
    with nobody_hears() as shards:
        ran = torchrun("refused", shards)
    said = {(line["rank"], line["kind"]): line["why"] for line in map(json.loads, ran.stdout.splitlines())}

    assert {kind: re.split(r"[.:,] ", why)[0] for (rank, kind), why in said.items() if rank == 0} == {
        "ddp": "the model is wrapped in DistributedDataParallel",
        "fsdp1": "the model is wrapped in FullyShardedDataParallel (FSDP1)",
        "fsdp1, inside": "_flat_param is flattened by FullyShardedDataParallel (FSDP1)",
        "fsdp2": "the model is wrapped in fully_shard (FSDP2)",
        "inside of ddp": "this process is one of 2 (a process group is initialised)",
    }
    assert {why for (rank, _), why in said.items() if rank == 1} == {
        "rank 1 of 2 ends: this model cannot be joined like this; rank 0 says what to do"
    }
    assert ran.returncode == 1
    summary = ran.stderr.rpartition("Root Cause")[2]
    assert ONE_PROCESS in summary, ran.stderr


@pytest.mark.gate
def test_two_ranks_that_train_alone_are_two_learners(serve) -> None:
    shard = serve(settings_with(sync={"quorum": 2}))
    ran = torchrun("alone", shard.address)
    assert ran.returncode == 0, ran.stderr
    assert sorted(m.learner_id for m in shard.core.membership.all()) == ["rank-0", "rank-1"]
    assert all(m.merged > 0 for m in shard.core.membership.all())


def test_the_built_in_worker_trains_alone_whatever_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = [sys.executable, "-m", "diloco_demo", "--shards=127.0.0.1:9", "--set=worker.device=cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        said = ""
        while "no connection" not in said and (line := worker.stderr.readline()):
            said += line
        worker.kill()
    assert "no connection" in said, said


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("make", "is_spread"), [(fsdp2, True), (lambda: DistributedDataParallel(plain()), False)])
def test_parameters_are_spread_under_fsdp2_and_whole_under_ddp(make: Callable[[], nn.Module], is_spread: bool) -> None:
    assert IslandGroup(dist.group.WORLD).replica(SharedSet(make()), None).is_spread is is_spread
