"""`diloco doctor --device`: a bit that flips is found, and a device that is not there is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest
import torch
from torch import Tensor

from diloco_deploy.doctor import device

CPU = torch.device("cpu")


def passing(seconds: float) -> Callable[[], float]:
    """A clock that goes on by so many seconds each time that somebody looks."""
    now: Iterator[int] = count()
    return lambda: next(now) * seconds


def flipped(which: int, in_tensor: int) -> Callable[[], Sequence[Tensor]]:
    """Real work, but the lowest bit of one number is wrong the which-th time."""
    work, times = device.Work(CPU).run, count()

    def run() -> Sequence[Tensor]:
        came_out = work()
        if next(times) == which:
            came_out[in_tensor].view(torch.uint8).view(-1)[12] ^= 1
        return came_out

    return run


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (device.Work(CPU).run, "OK"),
        (flipped(3, 0), "DEVICE_WRONG"),  # in a matrix product
        (flipped(1, 1), "DEVICE_WRONG"),  # in what the optimizer has done
    ],
    ids=["a sound device", "a product", "an optimizer step"],
)
def test_a_bit_that_flips_is_found(work: Callable[[], Sequence[Tensor]], code: str) -> None:
    found = device.same_bits(work, 4.0, passing(1.0))
    assert found.code == code
    assert found.figures["times"] == 5


def test_a_cpu_is_looked_at_as_a_card_is() -> None:
    found = [check.look() for check in device.checks("cpu", soak_s=0.0)]
    assert [finding.code for finding in found] == ["OK"] * 4
    assert found[1].figures["bytes_per_s"] > 0


def test_a_device_that_is_not_there_is_named() -> None:
    (check,) = device.checks("nowhere")
    assert check.look().code == "DEVICE_MISSING"
