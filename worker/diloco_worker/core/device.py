"""What threads and streams of an accelerator must know of each other, whatever its make: CUDA, ROCm, XPU, NPU, MPS.

torch 2.6 and later ask for no name of a device (`torch.accelerator`, `torch.Stream`). Before, each make has a module of
its own that does the same (`torch.cuda`, `torch.xpu`). This file is the only place that knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether work for it is queued, and done later than the call returns."""
    return device.type not in ("cpu", "meta")


def wait_for_device(device: torch.device) -> None:
    """Until what this thread has computed there is there for every thread and stream."""
    if is_accelerator(device):
        _stream(device).synchronize()


def queued_until(values: Tensor) -> Callable[[], None] | None:
    """A call that waits until the work queued so far is in `values`; None: it is there already."""
    if not is_accelerator(values.device):
        return None
    wait: Callable[[], None] = _stream(values.device).record_event().synchronize
    return wait


def used_here(values: Tensor) -> None:
    """Another thread has allocated them, perhaps for another stream: keep the memory until this one is done with it."""
    if is_accelerator(values.device):
        values.record_stream(_stream(values.device))


def in_pinned_memory(values: Tensor) -> Tensor:
    """A copy in pages of the host that stay in memory, from where a device reads fastest. Waits until it is there."""
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)


def on_its_way(values: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """These values on the CPU, and whether they are there by now. Waits for nothing."""
    if not is_accelerator(values.device):
        return values, lambda: True
    copy = values.to("cpu", non_blocking=True)  # into pinned memory, where torch has that
    return copy, _stream(values.device).record_event().query


def _stream(device: torch.device) -> Any:
    """The one of this thread: a torch.Stream, or what its module has in its place."""
    module = torch.accelerator if hasattr(torch, "accelerator") else getattr(torch, device.type)
    return module.current_stream(device)
