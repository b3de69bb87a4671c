"""The seam to accelerators: no file names a make of device, with a torch that has `torch.accelerator` or not."""

from __future__ import annotations

import re
from pathlib import Path
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


def test_no_other_file_of_the_worker_names_a_make(repository: Path) -> None:
    names = re.compile(r"torch\.(cuda|xpu|mps|npu)\b|\.is_cuda\b|== \"cuda\"")
    sources = [p for p in (repository / "worker/diloco_worker").rglob("*.py") if p.name != "device.py"]
    assert sources
    assert [str(p) for p in sources if names.search(p.read_text(encoding="utf-8"))] == []
