"""Memory of large tensors: it is used again once nobody views it, and not before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from diloco_common.codec import memory
from diloco_worker.core import device

SIZE = memory.LEAST // 4 + 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_is_gone_leaves_its_memory_to_the_next(dtype: torch.dtype) -> None:
    first = memory.empty(SIZE * 2, dtype)
    assert (first.shape, first.dtype) == ((SIZE * 2,), dtype)
    address = first.data_ptr()
    del first
    assert memory.empty(SIZE * 2, dtype).data_ptr() == address


def test_memory_that_a_view_still_shows_is_not_used_again() -> None:
    tensor = memory.empty(SIZE).fill_(7.0)
    part, address = tensor[100:200].view(10, 10), tensor.data_ptr()
    del tensor
    other = memory.empty(SIZE).fill_(0.0)
    assert other.data_ptr() != address
    assert part.eq(7.0).all()
    del part
    assert memory.empty(SIZE).data_ptr() == address


def test_a_block_that_nobody_needed_for_long_goes() -> None:
    """After a burst, a pool keeps what is needed at once since, and not what was needed then."""
    pool = memory.Pool()
    burst = [pool.take(memory.LEAST) for _ in range(5)]
    del burst
    assert len(pool) == 5
    for _ in range(memory.WINDOW):
        [pool.take(memory.LEAST), pool.take(memory.LEAST)]
    assert len(pool) == 2


def test_blocks_that_are_free_can_be_given_back_and_those_in_use_stay() -> None:
    pool = memory.Pool()
    used, free, returned = (pool.take(memory.LEAST) for _ in range(3))
    del free
    used[:3] = b"abc"
    pool.take(memory.LEAST)
    del returned
    pool.drop()
    assert len(pool) == 0
    again = pool.take(memory.LEAST)
    again[:3] = b"xyz"
    assert bytes(used[:3]) == b"abc"


class Stream:
    """One of an accelerator that this machine has not."""

    def __init__(self) -> None:
        self.was_waited_for = False

    def synchronize(self) -> None:
        self.was_waited_for = True


@pytest.mark.parametrize("module", ["accelerator", "xpu"], ids=["torch 2.6 and later", "earlier"])
def test_a_device_of_any_make_is_waited_for(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    if module != "accelerator":
        monkeypatch.delattr(torch, "accelerator", raising=False)
    monkeypatch.setattr(torch, module, SimpleNamespace(current_stream=lambda of: stream), raising=False)

    device.wait_for_device(torch.device("xpu"))
    assert stream.was_waited_for
