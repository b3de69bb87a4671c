"""Settings as people read them: every value, and where it comes from. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from diloco_common.settings_loader import Given, Loaded

DEFAULT = "default"


def settings_with_origins(loaded: Loaded, *, only_given: bool = False) -> dict[str, Given]:
    """Every setting (section.key) with its effective value, as JSON has it, and its source."""
    tree = loaded.settings.model_dump(mode="json")
    return {
        name: Given(value, loaded.given[name].source if name in loaded.given else DEFAULT)
        for section, keys in tree.items()
        for key, value in keys.items()
        if (name := f"{section}.{key}") in loaded.given or not only_given
    }


def as_lines(found: Mapping[str, Given], *, origin: bool) -> Iterator[str]:
    """TOML. What is none is a comment, because TOML has no word for it."""
    last = ""
    for name, one in found.items():
        section, key = name.split(".")
        if section != last:
            yield from (["", f"[{section}]"] if last else [f"[{section}]"])
            last = section
        line = f"# {key} =" if one.value is None else f"{key} = {_toml(one.value)}"
        yield f"{line:<40}  # {one.source}" if origin else line


def _toml(value: Any) -> str:
    """Numbers, texts, lists and booleans are the same in JSON; but for very small numbers, which need no care here."""
    return json.dumps(value, ensure_ascii=False)
