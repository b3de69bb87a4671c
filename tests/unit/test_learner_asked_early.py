"""A learner that waits for its last shard is already asked by the others."""

from __future__ import annotations

from torch import nn

from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Collect, FragmentStatus, LearnerPolicy
from diloco_worker.core.events import Asked
from diloco_worker.core.fragment import AskedRound
from diloco_worker.core.replica import Replica
from parts import Parts, joined

POLICY = LearnerPolicy(1, "float32", "float32", "carry", 0.5, False)


def test_a_round_that_asks_before_the_model_is_cut_is_answered_afterwards() -> None:
    model = nn.Linear(2, 2, bias=False)
    addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    learner = Parts().learner(model, addresses)
    digest = cut(Replica(model).specs, 2, 2).digest
    first, second = (
        joined(
            5 + index,
            POLICY,
            fragments=[FragmentStatus(index, True, 0, 0, 5 + index)],
            num_fragments=2,
            digest=digest,
            address=address,
            index=index,
            num_shards=2,
        )
        for index, address in enumerate(addresses)
    )

    learner._inbox.put(first)
    learner._inbox.put(Asked(Collect(0, 1, 5), 5))
    learner.poll()
    learner._inbox.put(second)
    learner.poll()

    assert learner.core is not None
    assert learner.core.fragments[0].asked == AskedRound(1, 5, 5)
