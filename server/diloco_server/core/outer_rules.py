"""The outer optimizers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diloco_common.settings import OuterSettings
from diloco_server.core.outer import Adam, Nesterov, OuterOptimizer, Sgd

Rule = Callable[[OuterSettings], OuterOptimizer]

OUR_RULES: Mapping[str, Rule] = {
    "nesterov": Nesterov,
    "sgd": Sgd,
    "adam": Adam,
}


def make_outer_optimizer(settings: OuterSettings, rule: Rule | None = None) -> OuterOptimizer:
    """The optimizer that the settings name; `rule`: what they name, if it is not one of ours."""
    return (rule or OUR_RULES[settings.optimizer])(settings)
