"""What loaders draw from. Spawned workers import this file, so it imports nothing but torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Stream(IterableDataset[Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return (torch.full((4,), 1.0 / (1 + i)) for i in range(64))


def square(number: int) -> int:
    return number * number
