"""The acts of a step boundary: one that fails is told to the training, and those after it are performed."""

from __future__ import annotations

from typing import Any

from diloco_common.errors import DilocoError
from diloco_common.messages import Progress
from diloco_worker.connections import Connections
from diloco_worker.core.acts import ModelCut, StepEnded
from diloco_worker.core.events import Failed
from parts import Parts

NO_MANIFEST: Any = None


def test_an_act_that_fails_is_told_and_the_others_are_performed() -> None:
    """Only the event loop would hear of it, and the learner would train on alone."""
    parts = Parts()
    context = parts.context()

    def fails(tensors: object) -> None:
        raise RuntimeError("no room for the tensors")

    context.codec.own = fails  # type: ignore[method-assign,assignment]
    connections = Connections([], Progress(0, 0), context)
    ended = StepEnded(Progress(1, 8), 8, 0.5, 0.001)

    connections.perform([ModelCut(NO_MANIFEST, {}), ended])

    failed = context.inbox.pop()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, DilocoError)
    assert "ModelCut" in str(failed.error)
    assert "no room for the tensors" in str(failed.error)
    assert parts.telemetry.metrics.registry.get_sample_value("diloco_worker_inner_steps_total") == 1
