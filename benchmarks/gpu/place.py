"""Where cases run: the device with its clock, memory and streams; models are small on a CPU, of real size on a card."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from report import NotHere
from torch import Tensor

from diloco_common.settings import ModelSettings
from diloco_demo.data import load_corpus
from diloco_demo.gpt import GPT, build_gpt

PYTHON_SOURCES = "stdlib"


@dataclass(frozen=True)
class Place:
    device: torch.device
    seed: int
    ends_at: float
    """Wall-clock time at which the step must end."""

    @classmethod
    def of(cls, device: str, seed: int, ends_at: float) -> Place:
        torch.manual_seed(seed)
        if device == "cpu":
            torch.set_num_threads(1)
        return cls(torch.device(device), seed, ends_at)

    @property
    def is_card(self) -> bool:
        return self.device.type != "cpu"

    def need_card(self, why: str = "a card") -> None:
        if not self.is_card:
            raise NotHere(f"needs {why}")

    def left_s(self) -> float:
        return self.ends_at - time.time()

    @property
    def module(self) -> Any:
        """torch.cuda, or torch's module for another accelerator."""
        return getattr(torch, self.device.type)

    def card(self) -> str:
        return str(self.module.get_device_name()) if self.is_card else "none (a rehearsal on the CPU)"

    def wait(self) -> None:
        if self.is_card:
            self.module.synchronize()

    # ------------------------------------------------------------ the device's own clock and memory

    def mark(self) -> Any:
        """A moment on the device's clock. On a CPU: now."""
        if not self.is_card:
            return time.perf_counter()
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, one: Any, other: Any) -> float:
        """Seconds between two marks on the device's clock. Does not wait for the device: call `wait` before."""
        return float(other - one) if not self.is_card else float(one.elapsed_time(other)) / 1e3

    def reset_peak(self) -> None:
        if self.is_card:
            self.module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Maximum number of bytes allocated since `reset_peak`. 0 on a CPU."""
        return int(self.module.max_memory_allocated()) if self.is_card else 0

    # ------------------------------------------------------------ models and batches

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_card)

    def gpt(self, layers: int, width: int, context: int) -> GPT:
        """A model on the device. Its values are drawn there: a CPU takes ten seconds for a billion numbers."""
        settings = ModelSettings(layers=layers, width=width, heads=max(1, width // 64), context=context)
        if not self.is_card:
            return build_gpt(settings, self.seed)
        with self.device:
            model = GPT(settings)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return model

    def batches(self, batch: int, context: int, source: str = PYTHON_SOURCES, seed: int = 0) -> Iterator[Tensor]:
        """Real bytes, drawn on the host and copied from pinned memory: int64 [batch, context + 1]."""
        text = load_corpus(source, 0.01).train
        generator = torch.Generator().manual_seed(seed)
        columns = torch.arange(context + 1)
        while True:
            starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
            rows = text[starts + columns]
            yield (rows.pin_memory().to(self.device, non_blocking=True) if self.is_card else rows).long()


def train_step(place: Place, model: GPT, optimizer: torch.optim.Optimizer, rows: Tensor) -> Tensor:
    """Forward, backward, step. Does not wait for the device."""
    with place.autocast():
        loss = model.loss(rows[:, :-1], rows[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def adamw(place: Place, model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=place.is_card)


def timed(work: Callable[[], object], place: Place, times: int) -> float:
    """Mean seconds of one call, on the device's clock, after a call to warm up."""
    work()
    place.wait()
    began = place.mark()
    for _ in range(times):
        work()
    ended = place.mark()
    place.wait()
    return place.between_s(began, ended) / times
