"""Synchronization between threads and the streams of any accelerator: CUDA, ROCm, XPU, NPU, MPS.

torch 2.6 and later need no device name (`torch.accelerator`, `torch.Stream`); in earlier versions, each kind has its
own module (`torch.cuda`, `torch.xpu`). Only this file knows the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Whether calls for it return before the work is done."""
    return device.type not in ("cpu", "meta")


def wait_for_device(device: torch.device) -> None:
    """Wait until this thread's work on the device is visible to all threads and streams."""
    if is_accelerator(device):
        _stream(device).synchronize()


def queued_until(values: Tensor) -> Callable[[], None] | None:
    """A function that waits until the work queued so far is in `values`; None: it is there already."""
    if not is_accelerator(values.device):
        return None
    wait: Callable[[], None] = _stream(values.device).record_event().synchronize
    return wait


def used_here(values: Tensor) -> None:
    """Keep the memory of values that another thread allocated, perhaps for another stream, until our stream is done."""
    if is_accelerator(values.device):
        values.record_stream(_stream(values.device))


def in_pinned_memory(values: Tensor) -> Tensor:
    """A copy in pinned host memory, from which a device reads fastest. Waits until the copy is done."""
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)


def on_its_way(values: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy on the CPU, and a function that tells whether it is complete. Never waits."""
    if not is_accelerator(values.device):
        return values, lambda: True
    copy = values.to("cpu", non_blocking=True)  # pinned memory, if torch has it
    return copy, _stream(values.device).record_event().query


def _stream(device: torch.device) -> Any:
    """This thread's stream: a torch.Stream, or the older module's own type."""
    module = torch.accelerator if hasattr(torch, "accelerator") else getattr(torch, device.type)
    return module.current_stream(device)
