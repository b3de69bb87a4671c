"""Checks a training device: whether it computes the same bits twice, its memory, and its bandwidth. Imports torch.

A faulty card may compute wrong values silently. Here it repeats the same work for a minute, and every bit is compared
on the card itself. Errors that repeat identically are not found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diloco_common import units
from diloco_deploy.doctor import TIMES, Check, ReportLine, failure, ok

SOAK_S = 60.0
OPTIMIZER_STEPS = 8


class Sizes(NamedTuple):
    matrix: int
    copied_bytes: int


ACCELERATOR, CPU = Sizes(8192, 1 << 30), Sizes(256, 16 << 20)


def checks(name: str, soak_s: float = SOAK_S) -> list[Check]:
    """All checks of one device, as torch names it: "cuda", "cuda:1", "xpu", "cpu"."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        why = failure("DEVICE_MISSING", f"torch {torch.__version__} cannot use {name!r}: {error}".splitlines()[0])
        return [Check("device", name, 1.0, lambda: why)]
    return [
        Check("device", name, 5.0, partial(free_memory, device)),
        Check("bandwidth", name, 15.0, partial(bandwidth, device)),
        Check("copies", name, 15.0, partial(copies, device)),
        Check("same bits", name, soak_s + 15.0, partial(soak, device, soak_s)),
    ]


class Work:
    """Matrix products and optimizer steps from fixed inputs."""

    def __init__(self, device: torch.device) -> None:
        size = _sizes(device).matrix
        drawn = torch.Generator(device).manual_seed(0)
        self._halves = [torch.randn(size, size, generator=drawn, device=device).bfloat16() for _ in range(2)]
        self._start = torch.randn(size, size, generator=drawn, device=device)

    def run(self) -> Sequence[Tensor]:
        """The results, bfloat16 and float32, the same bits each time."""
        product = self._halves[0] @ self._halves[1]
        theta = torch.nn.Parameter(self._start.clone())
        optimizer = torch.optim.AdamW([theta], lr=1e-3)
        for _ in range(OPTIMIZER_STEPS):
            theta.grad = product.float().mul_(theta.detach())
            optimizer.step()
        return product, theta.detach()


def soak(device: torch.device, seconds: float) -> ReportLine:
    return same_bits(Work(device).run, seconds, time.monotonic)


def same_bits(work: Callable[[], Sequence[Tensor]], soak_s: float, clock: Callable[[], float]) -> ReportLine:
    """Whether the work gives the same bits each time, for `soak_s` seconds and at least twice."""
    first, times, wrong = work(), 1, 0
    ends = clock() + soak_s
    while times < 2 or clock() < ends:
        again = work()
        wrong += not all(_are_same(one, other) for one, other in zip(first, again, strict=True))
        times += 1
    if wrong:
        return failure(
            "DEVICE_WRONG", f"{wrong} of {times - 1} repetitions gave different bits", times=times, wrong=wrong
        )
    return ok(f"{times} times the same matrix products and optimizer steps, and the same bits", times=times)


def bandwidth(device: torch.device) -> ReportLine:
    one = torch.ones(_sizes(device).copied_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    rate = 2 * one.numel() / _seconds(lambda: other.copy_(one), device)
    return ok(f"its memory moves {units.size(rate)}/s, read and written", bytes_per_s=rate)


def copies(device: torch.device) -> ReportLine:
    is_apart = device.type != "cpu"
    host = torch.randint(256, (_sizes(device).copied_bytes // 4,), dtype=torch.uint8)
    host = host.pin_memory() if is_apart else host
    back, there = torch.empty_like(host, pin_memory=is_apart), torch.empty_like(host, device=device)
    down = host.numel() / _seconds(lambda: there.copy_(host, non_blocking=True), device)
    up = host.numel() / _seconds(lambda: back.copy_(there, non_blocking=True), device)
    if not _are_same(host, back):
        return failure("DEVICE_WRONG", "data copied there and back differs from the data sent")
    said = f"pinned copies: {units.size(down)}/s there, {units.size(up)}/s back"
    return ok(said, to_bytes_per_s=down, from_bytes_per_s=up)


def free_memory(device: torch.device) -> ReportLine:
    """Memory that torch could still allocate. For a CPU, another check covers this."""
    module = _module(device)
    if not hasattr(module, "mem_get_info"):
        return ok(f"{device}: torch does not say how much memory is free")
    free, total = module.mem_get_info(device)
    said = f"{module.get_device_name(device)}: {units.size(free)} of {units.size(total)} free"
    return ok(said, free_bytes=free, total_bytes=total)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: NaN is the same as itself, and 0.0 is not -0.0."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        _wait(device)
        took.append(time.perf_counter() - began)
    return max(min(took), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        _module(device).synchronize()


def _sizes(device: torch.device) -> Sizes:
    return CPU if device.type == "cpu" else ACCELERATOR


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)
