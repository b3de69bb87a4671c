"""Third-party rules: found by a dotted name, `mypkg.mymod:thing`, or as `plugin:NAME`, an installed entry point.

group            type of the rule
diloco.outer     a subclass of diloco_server.core.outer.OuterOptimizer
diloco.merge     a function, diloco_server.core.merge.MergeRule
diloco.inner     a function of model and TrainSettings that returns a torch optimizer
diloco.codec     an instance of diloco_common.codec.Codec; by entry point only, since its name is sent to others
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from diloco_common.errors import ConfigError

PLUGIN = "plugin:"


@dataclass(frozen=True)
class Extension:
    thing: Any
    source: str
    """SHA-256 of its file, 16 hex digits; "" if there is no file. It must be equal in all processes of a run."""


def is_extension(name: str) -> bool:
    return ":" in name


def find(group: str, name: str) -> Extension:
    """Find the rule that a setting names. Raises ConfigError."""
    thing = _plugin(group, name.removeprefix(PLUGIN)) if name.startswith(PLUGIN) else _dotted(name)
    try:
        path = inspect.getsourcefile(thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing))
        source = hashlib.sha256(Path(path or "").read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        source = ""
    return Extension(thing, source)


@cache
def plugin_names(group: str) -> tuple[str, ...]:
    """The installed entry points of a group, as settings name them."""
    return tuple(sorted({PLUGIN + point.name for point in entry_points(group=group)}))


def _plugin(group: str, name: str) -> Any:
    found = [point for point in entry_points(group=group) if point.name == name]
    if not found:
        there = ", ".join(plugin_names(group)) or "none"
        raise ConfigError(
            f"{PLUGIN}{name}: no installed package has this entry point of {group} (there are: {there}); install it on "
            "every machine of the run"
        )
    try:
        return found[0].load()
    except Exception as error:
        raise ConfigError(f"{PLUGIN}{name} of {group} cannot be loaded: {error!r}") from error


def _dotted(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(
            f"{name} cannot be loaded: {error!r}; is its folder on PYTHONPATH, on every machine of the run?"
        ) from error
