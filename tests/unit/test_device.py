"""The seam to accelerators: no file names a make of device, with a torch that has `torch.accelerator` or not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from diloco_worker.core import device


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
