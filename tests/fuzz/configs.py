"""Settings from files, environment and `--set`: right names with wrong values, wrong names, and what is no TOML."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from fuzzing import FLOATS, NUMBERS, TEXTS, mutated

from diloco_common.settings import Settings
from diloco_common.settings_loader import load, load_saved

NAMES = [
    f"{section}.{key}" for section, field in Settings.model_fields.items() for key in field.annotation.model_fields
]  # type: ignore[union-attr]
DEFAULTS = json.loads(Settings().model_dump_json())
_folder = tempfile.TemporaryDirectory(prefix="fuzz-")

Case = dict[str, Any]


def draw(chance: random.Random) -> Case:
    """Where settings come from, each with something in it."""
    if chance.random() < 0.3:
        return {"saved": _saved(chance)}
    return {
        "toml": _toml(chance) if chance.random() < 0.7 else None,
        "environ": {_variable(chance): _text(chance) for _ in range(chance.choice((0, 0, 1, 3)))},
        "set": [
            f"{_name(chance)}{chance.choice(('=', '=', '=', '', '=='))}{_text(chance)}"
            for _ in range(chance.choice((0, 1, 2)))
        ],
    }


def answer(case: Case) -> str:
    """Load them. Raises ConfigError, with a line for each problem."""
    if "saved" in case:
        path = Path(_folder.name) / "settings.json"
        path.write_bytes(case["saved"])
        load_saved(path)
        return "OK"
    path = Path(_folder.name) / "run.toml"
    if case["toml"] is not None:
        path.write_bytes(case["toml"])
    load(path if case["toml"] is not None else None, case["environ"], case["set"])
    return "OK"


def _name(chance: random.Random) -> str:
    return chance.choice(NAMES) if chance.random() < 0.9 else chance.choice(TEXTS)


def _variable(chance: random.Random) -> str:
    name = _name(chance).replace("\0", "").replace(".", "__").upper()
    return ("DILOCO_" if chance.random() < 0.95 else "diloco_") + name


def _text(chance: random.Random) -> str:
    return str(_value(chance)).replace("\0", "")


def _value(chance: random.Random) -> Any:
    kinds: tuple[Any, ...] = (
        chance.choice(NUMBERS), -chance.choice(NUMBERS), chance.choice(FLOATS), chance.choice(TEXTS), True, "",
        chance.choice(("all", "adaptive", "int8", "none", "1,2", "127.0.0.1:0", "10**400", "1e999", "0x10", "१२")),
    )  # fmt: skip
    return chance.choice(kinds)


def _toml(chance: random.Random) -> bytes:
    lines = []
    for _ in range(chance.choice((0, 1, 2, 5))):
        section, _, key = _name(chance).partition(".")
        value = _value(chance)
        text = json.dumps(value) if isinstance(value, str) else str(value).lower()
        lines += [f"[{section}]" if chance.random() < 0.9 else section, f"{key} = {text}"]
    data = "\n".join(lines).encode()
    return mutated(chance, data) if chance.random() < 0.3 else data


def _saved(chance: random.Random) -> bytes:
    tree = json.loads(json.dumps(DEFAULTS))
    for _ in range(chance.choice((0, 1, 2, 4))):
        section = chance.choice(list(tree))
        match chance.randrange(5):
            case 0:
                tree[section] = _value(chance)
            case 1:
                tree[chance.choice(TEXTS)] = {chance.choice(TEXTS): 1}
            case _ if isinstance(tree[section], dict) and tree[section]:
                tree[section][chance.choice(list(tree[section]))] = _value(chance)
    data = json.dumps(tree).encode()
    return mutated(chance, data) if chance.random() < 0.3 else data
