"""The digest of what the built-in training declares at Join, from its settings: what shards are told to insist on.

Needs no torch, which takes seconds to import, unless the momentum of an optimizer of others is averaged.
"""

from __future__ import annotations

from diloco_common.extensions import is_extension
from diloco_common.manifest import model_digest
from diloco_common.settings import Settings
from diloco_worker.builtin.shapes import built_in_companions, gpt_tensors


def declared_digest(settings: Settings) -> str:
    """The digest (`run.model`) of what workers with these settings bring to Join: the model, and its momentum if that
    is averaged.

    Where an optimizer of others is averaged, only that says what it keeps: it is made. Raises ConfigError and
    UnsupportedModel.
    """
    model, train = gpt_tensors(settings.model), settings.train
    if not train.average_momentum:
        return model_digest(model)
    if not is_extension(train.optimizer):
        return model_digest([*model, *built_in_companions(settings)])
    from diloco_worker.builtin.gpt import build_gpt
    from diloco_worker.builtin.training import make_optimizer
    from diloco_worker.joining import digest_of

    made = build_gpt(settings.model, settings.run.seed)
    return digest_of(made, companions=make_optimizer(made, train))
