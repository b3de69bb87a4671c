"""The state of a learner that outlives its process: its counters and identity.

A training loop saves it in its own checkpoint, beside the model and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from numbers import Integral
from types import NoneType
from typing import Any

from diloco_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LearnerState:
    run: str
    learner_id: str
    index: int | None
    """Its number among the learners; None: it had none yet."""
    inner_step: int
    tokens: int
    tokens_merged: int = 0
    """Tokens merged by the run, as far as known here. If a shard has no values, the highest count seeds it."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for torch.save, JSON and the like."""
        return asdict(self)


def _what_is_wrong(saved: object) -> str:
    """What is wrong with a saved state, or ""."""
    if not isinstance(saved, Mapping):
        return f"it is a {type(saved).__name__}"
    if missing := sorted({f.name for f in fields(LearnerState) if f.default is MISSING} - saved.keys()):
        return f"it has no {', '.join(missing)}"
    for name, kinds in (
        ("run", str), ("learner_id", str), ("index", (Integral, NoneType)), ("inner_step", Integral),
        ("tokens", Integral), ("tokens_merged", Integral),
    ):  # fmt: skip
        value = saved.get(name, 0)
        if not isinstance(value, kinds) or (isinstance(value, int) and value < 0):
            return f"its {name} is {value!r}"
    return ""


def blank_state() -> dict[str, Any]:
    """An empty state for `torch.distributed.checkpoint.load`, which only fills in entries that exist.

    `join(state=...)` also accepts it unfilled, as the state of a new learner.
    """
    return LearnerState("", "", None, 0, 0).as_dict()


def read_state(state: Mapping[str, Any] | None, run: str) -> LearnerState | None:
    """The state given to `join(state=...)`; None if there is none, or a blank one.
    Raises ConfigError if it is invalid, or of a run other than `run`."""
    if state is None or state in ({}, blank_state()):
        return None
    if wrong := _what_is_wrong(state):
        raise ConfigError(
            f"state= is not what learner.state_dict() gave: {wrong}; save it beside the model and the optimizer, "
            "and give it back as it was"
        )
    if state["run"] != run:
        raise ConfigError(f"state= is of run {state['run']!r}, and this is run {run!r}: leave it out, or give run=")
    return LearnerState(**{f.name: state[f.name] for f in fields(LearnerState) if f.name in state})
