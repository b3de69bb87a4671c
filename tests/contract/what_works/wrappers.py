"""What is put around a model, or around parts of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from test_ranks_contract import DeepSpeedEngine, fsdp1, tensor_parallel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from what_works.script import DEVICE, RATE, Cases, Ground, Script, loop, loss_of, small, usual

CASES = Cases()


@contextmanager
def one_rank() -> Iterator[None]:
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


CASES.script("torch.compile(model)")(lambda: usual(torch.compile(small(), backend="eager"), plain=small))


@CASES.script("model.compile()")
def compiled_in_place() -> Script:
    model = small()
    model.compile(backend="eager")
    return usual(model, plain=small)


@CASES.script("a compiled step")
def compiled_step() -> Script:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    @torch.compile(backend="eager")
    def step() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Script(model, step)


@CASES.script("torch.jit.script(model)")
def scripted() -> Script:
    model = small()
    return Script(model, loop(torch.jit.script(model)), plain=small)


class Fixed(nn.Module):
    """Without parameters; in a file of its own, as TorchScript reads its source."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) * self.scale


@CASES.script("TorchScript modules without parameters")
def generated() -> Script:
    return usual(nn.Sequential(small(), torch.jit.script(Fixed())), plain=lambda: nn.Sequential(small(), Fixed()))


CASES.joins("the result of torch.jit.script or torch.jit.load", lambda: torch.jit.script(small()))
CASES.script("torch.fx and torch.export")(lambda: usual(torch.fx.symbolic_trace(small())))


@CASES.script("functional_call")
def functional() -> Script:
    model = small()
    named = dict(model.named_parameters())
    return Script(model, loop(model, loss=lambda: loss_of(lambda x: torch.func.functional_call(model, named, (x,)))))


@CASES.script("activation checkpointing, both kinds")
def checkpointed() -> Script:
    model = small()
    model[0] = checkpoint_wrapper(model[0])  # type: ignore[index,operator]
    return Script(
        model, loop(model, loss=lambda: loss_of(lambda x: checkpoint(model, x, use_reentrant=False))), plain=small
    )


CASES.script("DataParallel")(lambda: usual(DataParallel(small()), plain=small))


@CASES("DistributedDataParallel with island=")
def ddp(ground: Ground) -> None:
    with one_rank():
        model = DistributedDataParallel(small())
        ground.trains(usual(model, options={"island": dist.group.WORLD}, plain=small))


@CASES("fully_shard (FSDP2) with island=")
def fsdp2(ground: Ground) -> None:
    with one_rank():
        model = fully_shard(small(), mesh=init_device_mesh(DEVICE.type, (1,)))
        ground.trains(usual(model, options={"island": dist.group.WORLD}, plain=small))


def refused(make: Callable[[], nn.Module]) -> Callable[[Ground], None]:
    def case(ground: Ground) -> None:
        with one_rank(), ground.learner(make(), "script"):
            pass

    return case


CASES("DistributedDataParallel or fully_shard without island=")(refused(lambda: DistributedDataParallel(small())))
CASES("FullyShardedDataParallel (FSDP1)")(refused(fsdp1))
CASES("tensor parallelism")(refused(tensor_parallel))


CASES("DeepSpeed")(refused(DeepSpeedEngine))


@CASES("torchrun with several processes, without island=")
def torchrun(ground: Ground) -> None:
    with patch.dict(os.environ, RANK="0", WORLD_SIZE="2"), ground.learner(small(), "script"):
        pass


@CASES('torchrun with several processes, and island="alone"')
def torchrun_alone(ground: Ground) -> None:
    with patch.dict(os.environ, RANK="0", WORLD_SIZE="2"):
        ground.trains(usual(small(), options={"island": "alone"}))


def made_again(make: Callable[[], nn.Module]) -> Script:
    """What was put around this model cannot be copied."""
    torch.manual_seed(0)
    return usual(make(), plain=make)


CASES.script("the old weight_norm (weight_g, weight_v)")(
    lambda: made_again(lambda: nn.utils.weight_norm(nn.Linear(4, 2)))
)
CASES.script("parametrizations.weight_norm and orthogonal")(
    lambda: made_again(
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.orthogonal(nn.Linear(4, 2))
        )
    )
)
CASES.script("spectral_norm, both kinds")(
    lambda: made_again(
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 2)))
    )
)


@CASES.script("your own parametrization, also inside parametrize.cached()")
def own_parametrization() -> Script:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    parametrize.register_parametrization(model[0], "weight", Symmetric())

    def loss() -> Tensor:
        with parametrize.cached():
            return loss_of(model)

    return Script(model, loop(model, loss=loss))


@CASES.script("pruning (a mask) before join")
def pruned() -> Script:
    def made() -> nn.Module:
        model = small()
        prune.l1_unstructured(model[0], "weight", amount=0.5)  # type: ignore[index,no-untyped-call]
        return model

    return made_again(made)


@CASES("pruning after join")
def pruned_later(ground: Ground) -> None:
    model = small()
    script = usual(model, between=lambda learner: prune.l1_unstructured(model[0], "weight", amount=0.5))  # type: ignore[index,no-untyped-call]
    ground.trains(script)


@CASES.script("module and gradient hooks")
def hooks() -> Script:
    model = small()
    model[0].register_forward_hook(lambda module, inputs, output: output * 1.0)  # type: ignore[index]
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # type: ignore[index]
    return usual(model)
