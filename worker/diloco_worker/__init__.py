"""The learner: train locally, push pseudo-gradients in the background, lay new versions under your own progress.

with diloco_worker.join("ps-0:50051,ps-1:50051", model) as learner:
    for batch in loader:
        ...
        learner.step(tokens=batch.numel(), loss=loss)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_worker.joining import join
    from diloco_worker.learner import Learner

__all__ = ["Learner", "join"]


def __getattr__(name: str) -> object:
    if name in __all__:  # imported on first use: torch and grpc take seconds
        from diloco_worker import joining

        return getattr(joining, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
