"""When a contribution is pushed, and what an answer to one of several pushes says about it."""

from __future__ import annotations

import pytest
import torch

from diloco_common.errors import BadChecksum, NotFinite
from diloco_common.wire.messages import Outcome, PushAnswer
from diloco_worker.core.connection import Lease
from diloco_worker.core.fragment import PendingContribution, Pushes
from diloco_worker.core.tensors import ContributionTensors

TAKEN = [PushAnswer(Outcome.ACCEPTED), PushAnswer(Outcome.DUPLICATE)]
REFUSED = [PushAnswer(Outcome.LATE)] + [PushAnswer(Outcome.REJECTED, e.code) for e in (BadChecksum, NotFinite)]
FIRST, SECOND = Lease(1, 1), Lease(1, 2)


def contribution(shard_epoch: int) -> PendingContribution:
    tensors = ContributionTensors(
            4, torch.zeros(2), None, lambda out: None, dtype=torch.bfloat16, feeds_back=False, own=slice(0, 2)
        )  # fmt: skip
    return PendingContribution(0, 4, shard_epoch, 1, 3, 0, 10, 1, tensors)


@pytest.mark.parametrize("answer", REFUSED)
@pytest.mark.parametrize("earlier", [*TAKEN, None])
def test_what_was_refused_is_never_pushed_again_whatever_became_of_earlier_pushes(
    answer: PushAnswer, earlier: PushAnswer | None
) -> None:
    """Its learner gives it back. A lone learner would else push the same bytes for ever, and be refused for ever."""
    pushes = Pushes()
    pushes.begin(FIRST)
    pushes.ended(FIRST, earlier)
    pushes.begin(SECOND)
    pushes.ended(SECOND, answer)
    assert not pushes.begin(SECOND)
