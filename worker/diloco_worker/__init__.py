"""The learner: trains locally, pushes pseudo-gradients in the background, and adds new versions under its progress.

with diloco_worker.join("ps-0:50051,ps-1:50051", model) as learner:
    for batch in loader:
        ...
        learner.step(tokens=batch.numel(), loss=loss)
        if learner.done:
            break
    learner.finish()  # the model now holds the global values
"""

from importlib import import_module
from typing import TYPE_CHECKING

import diloco_common  # noqa: F401  before grpc (diloco_common/forks.py)

if TYPE_CHECKING:
    from diloco_worker.global_model import pull_global_model as pull_global_model
    from diloco_worker.global_model import versions as versions
    from diloco_worker.global_model import write_model as write_model
    from diloco_worker.joining import digest_of as digest_of
    from diloco_worker.joining import join as join
    from diloco_worker.learner import Learner as Learner
    from diloco_worker.progress_lr import ProgressLR as ProgressLR
    from diloco_worker.shell.island import init_island as init_island
    from diloco_worker.view import blank_state as blank_state

_MODULES = {
    "Learner": "diloco_worker.learner",
    "ProgressLR": "diloco_worker.progress_lr",
    "blank_state": "diloco_worker.view",
    "digest_of": "diloco_worker.joining",
    "init_island": "diloco_worker.shell.island",
    "join": "diloco_worker.joining",
    "pull_global_model": "diloco_worker.global_model",
    "versions": "diloco_worker.global_model",
    "write_model": "diloco_worker.global_model",
}


__all__ = tuple(_MODULES)


def __getattr__(name: str) -> object:
    if name in _MODULES:  # imported on first use: torch and grpc take seconds
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
