"""The example of an encoding, topk64_2bit: which elements are sent, and at which levels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from builders import decoded, random_values
from diloco_common.codec import encode_payload, registry

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from topk64_2bit import BLOCK, CODEC


@pytest.mark.parametrize("size", [1, 65, BLOCK, 2 * BLOCK + 129])
def test_the_largest_of_each_block_are_sent_at_the_two_levels_that_are_their_means(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._CODECS, CODEC.name, CODEC)  # as if a package named it
    values = random_values(size, 1)
    found = decoded(encode_payload(values.clone(), CODEC.name))
    for block, sent in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        largest = block.abs().topk(-(-len(block) // 64)).indices
        assert set(sent.nonzero().flatten().tolist()) == set(largest.tolist())
        assert sent[largest].sign().equal(block[largest].sign())
        assert len(sent.abs().unique()) <= 3, "two, and zero"
        assert sent.abs().sum().item() == pytest.approx(block[largest].abs().sum().item(), rel=1e-5)
