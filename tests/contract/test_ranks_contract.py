"""Models that several processes train together are refused before anything is sent, with the real wrappers of torch."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
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

ONE_PROCESS = "one process per device without torchrun"


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def fsdp1(**options: bool) -> nn.Module:
    return FullyShardedDataParallel(plain(), device_id=torch.device("cpu"), **options)


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

    monkeypatch.setenv("RANK", "3")  # the other ranks say it in a line
    assert why_not(plain()) == "rank 3 of 8 ends: this model cannot be joined like this; rank 0 says what to do"


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
@pytest.mark.parametrize(
    ("make", "is_spread"), [(plain, False), (fsdp2, True), (lambda: DistributedDataParallel(plain()), False)]
)
def test_a_model_of_an_island_has_the_names_and_shapes_that_it_has_alone(
    make: Callable[[], nn.Module], is_spread: bool
) -> None:
    replica = IslandGroup(dist.group.WORLD).replica(SharedSet(make()), None)
    assert (replica.specs, replica.is_spread) == (Replica(plain()).specs, is_spread)


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
