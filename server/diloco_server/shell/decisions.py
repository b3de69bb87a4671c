"""Decisions of a shard's core: what it was told, what it answered and what it asked for, one line for each call.

The core has no time, no chance and no thread of its own. So its settings and these lines are all that it decides by,
except for values, which it never looks at. `diloco_planner.replay` carries them out again. A line is

    {"what": "began", "settings": ..., "epoch": ...}                   a process
    {"what": "admit", "given": {...}, "gave": ... or "refused": CODE}   a call of `Shard`
    {"what": "did", "effects": [[name, ...facts], ...]}                what it asked its shell for since the last one

in the file of `run.history`/decisions that has the shard's name. Payloads and values are null.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from pydantic_core import to_jsonable_python

from diloco_common.codec import Payload
from diloco_common.errors import Refusal
from diloco_common.ports import History
from diloco_server.core.arithmetic import Published, Values
from diloco_server.core.effects import Effect, MergeRound, SeedFragment, Tell, TellAll
from diloco_server.core.fragment import Restored
from diloco_server.core.membership import Member
from diloco_server.core.round import Contribution
from diloco_server.core.shard import Shard

FOLDER = "decisions"
"""Of `run.history`: the judge reads what lies beside it."""
CALLS = (
    "restore", "join", "take_number", "attend", "progress", "leave", "revoke", "admit", "contribute", "reject",
    "seed_record", "seeded", "fail_seed", "next_record", "committed", "pulled", "named", "tick", "slept", "drain",
    "send_pulses",
)  # fmt: skip
"""Of a `Shard`, that change what it decides. The others only ask."""
SECTIONS = {"run", "sync", "outer", "lease", "guard", "shard"}


def record(shard: Shard, history: History) -> None:
    """Write down every call of this shard from now on."""
    settings = shard.settings.model_dump(mode="json", include=SECTIONS)
    history.write("began", settings=settings, epoch=shard.epoch)
    for name in CALLS:
        setattr(shard, name, _recorded(getattr(shard, name), history))
    take = shard.take_effects

    def take_effects() -> list[Effect]:
        if effects := take():
            history.write("did", effects=[effect_as_json(effect) for effect in effects])
        return effects

    shard.take_effects = take_effects  # type: ignore[method-assign]


def _recorded(call: Callable[..., Any], history: History) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @wraps(call)
    def recorded(*values: Any, **named: Any) -> Any:
        given = {name: as_json(value) for name, value in signature.bind(*values, **named).arguments.items()}
        try:
            gave = call(*values, **named)
        except Refusal as refusal:
            history.write(call.__name__, given=given, refused=refusal.code)
            raise
        history.write(call.__name__, given=given, gave=as_json(gave))
        return gave

    return recorded


def as_json(value: Any) -> Any:
    """Of what goes in and comes out: whom a member is, how a fragment was cut, and no values."""
    match value:
        case Member():
            return [value.learner_id, value.generation]
        case Refusal():
            return [value.code, str(value)]
        case Payload() | Published() | Values():
            return None
        case [Restored(), *_]:
            return [{"record": to_jsonable_python(r.record), "is_new_line": r.is_new_line} for r in value]
        case (record, Published()):
            return to_jsonable_python(record)
    return to_jsonable_python(value, inf_nan_mode="constants")


def effect_as_json(effect: Effect) -> list[Any]:
    """Its name, and what it says."""
    match effect:
        case Tell(learner_id, generation, directive):
            facts = [[learner_id, generation], type(directive).__name__, as_json(directive)]
        case TellAll(members, directive):
            facts = [[as_json(member) for member in members], type(directive).__name__, as_json(directive)]
        case SeedFragment(fragment_id):
            facts = [fragment_id]
        case MergeRound():
            merged, beside = ([_contribution(c) for c in of] for of in (effect.contributions, effect.beside))
            facts = [effect.fragment_id, effect.version, merged, beside, list(effect.left_out)]
        case _:
            facts = [as_json(effect)]
    return [type(effect).__name__, *facts]


def _contribution(one: Contribution) -> list[Any]:
    return [
        one.learner_id, one.generation, one.round, one.base_version, one.tokens, one.steps, list(one.piece_norms),
        one.counted, one.rounds, one.is_strange,
    ]  # fmt: skip
