"""Loads a user's outer optimizer, merge rule and codecs, if the settings name them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from diloco_common.codec.change import pull_encodings
from diloco_common.errors import ConfigError, UnknownEncoding
from diloco_common.extensions import find, is_extension
from diloco_common.settings import OuterSettings, Settings, SyncSettings
from diloco_common.wire.bounds import RULES_MAX
from diloco_server.core.merge import MergeRule
from diloco_server.core.outer import OuterOptimizer


@dataclass(frozen=True)
class Rules:
    merge: str | MergeRule
    outer: Callable[[OuterSettings], OuterOptimizer] | None = None
    """None: a built-in one."""
    sources: dict[str, str] = field(default_factory=dict)
    """Setting -> the name and the source digest of a user's rule or codec."""
    words: str = ""
    """Description of the merge rule and the outer optimizer. They must be the same on all shards of a run."""


_GROUPS = {
    "sync.merge": "diloco.merge", "outer.optimizer": "diloco.outer",
    "sync.push": "diloco.codec", "sync.pull": "diloco.codec",
}  # fmt: skip
"""Setting -> the group of entry points in which its name is looked up."""


def find_rules(settings: Settings) -> Rules:
    """Import the user's rules and codecs. Raises ConfigError."""
    sync = settings.sync
    by_name = {"sync.merge": sync.merge, "outer.optimizer": settings.outer.optimizer}
    found, sources = dict[str, Any](), dict[str, str]()
    for setting, name in (by_name | {"sync.push": sync.push, "sync.pull": sync.pull}).items():
        if is_extension(name):
            extension = find(_GROUPS[setting], name)
            found[setting], sources[setting] = extension.thing, f"{name} {extension.source}"
    if not callable(found.get("sync.merge", find_rules)):
        raise ConfigError(f"sync.merge {sync.merge} is not a function (diloco_server.core.merge.MergeRule)")
    outer = found.get("outer.optimizer")
    if outer is not None and not (isinstance(outer, type) and issubclass(outer, OuterOptimizer)):
        name = by_name["outer.optimizer"]
        raise ConfigError(f"outer.optimizer {name} is not a subclass of diloco_server.core.outer.OuterOptimizer")
    if outer is not None:
        _try_outer(outer, settings)
    words = ", ".join(f"{setting} {sources.get(setting, name)}" for setting, name in by_name.items())
    if len(words) > RULES_MAX:
        words = f"rules with the digest {hashlib.sha256(words.encode()).hexdigest()[:16]}"
    return Rules(found.get("sync.merge", sync.merge), outer, sources, words)


def _try_outer(rule: type[OuterOptimizer], settings: Settings) -> None:
    """Try one step of a user's optimizer before the run starts. Raises ConfigError."""
    name = f"outer.optimizer {settings.outer.optimizer}"
    try:
        optimizer = rule(settings.outer)
        optimizer.step(torch.zeros(1), torch.zeros(1), optimizer.new_buffers(1), 1)
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(f"{name} does not work: {error}") from error
    if optimizer.buffer_dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"{name} keeps buffers in {optimizer.buffer_dtype}; say torch.float32 or torch.bfloat16")


def check_codecs(sync: SyncSettings, sources: Mapping[str, str], decodes: Sequence[str]) -> None:
    """Raises UnknownEncoding if a learner lacks a codec of the run, or has a different one with its name. `decodes`:
    the codecs that it offers; `sources`: see `Rules`."""
    needed = pull_encodings(sync.pull)
    if not {*needed, sync.push} <= set(decodes):
        raise UnknownEncoding(
            f"versions are sent as {' and '.join(needed)} (sync.pull), contributions as {sync.push} (sync.push), "
            f"and the learner knows {', '.join(decodes) or 'none'}; install what is missing there"
        )
    theirs = [offer.partition("@")[2] for offer in decodes if offer.startswith(f"{sync.push}@")]
    mine = sources.get("sync.push", "").partition(" ")[2]
    if mine and theirs and mine not in theirs:
        raise UnknownEncoding(
            f"{sync.push} (sync.push) has the source {theirs[0]} on the learner, but {mine} on the shard; install the "
            "same version of its package on every machine of the run"
        )
