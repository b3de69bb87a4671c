"""Loads settings: TOML file, environment, `--set` and flags become one checked `Settings`.

Later sources win: defaults < file < environment (DILOCO_SECTION__KEY) < `--set section.key=value` < flags.
All problems are reported in one `ConfigError`, one line each, with the setting, its source and the allowed values.
`diloco up` passes `--settings FILE.json` to its children; the file holds every effective setting. A child then does not
read the environment, so it uses exactly what its parent decided.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from diloco_common import units
from diloco_common.errors import ConfigError, did_you_mean
from diloco_common.settings import Settings
from diloco_common.wire.addresses import write_json

ENV_PREFIX = "DILOCO_"


@dataclass(frozen=True)
class Given:
    """A value and its source: "run.toml:4", "DILOCO_SYNC__QUORUM", "--set" or the name of a flag."""

    value: object
    source: str


@dataclass(frozen=True)
class Loaded:
    """Checked settings, and the given value of each setting (section.key) that is not a default."""

    settings: Settings
    given: Mapping[str, Given]

    def describe_sources(self) -> list[str]:
        """One line for each setting that an environment variable decided, so that nobody overlooks it."""
        return [
            f"{name} = {given.value} from the environment variable {given.source}"
            for name, given in sorted(self.given.items())
            if given.source.startswith(ENV_PREFIX)
        ]


# ---------------------------------------------------------------- loading


def load(
    config: Path | None,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Given] | None = None,
    defaults: Mapping[str, Given] | None = None,
) -> Loaded:
    """Build the settings of a process.

    Args:
        config: TOML file, or none.
        environ: the environment. Only variables that begin with DILOCO_ are read.
        overrides: the arguments of `--set`, each "section.key=value".
        flags: section.key -> the value of an explicit flag.
        defaults: section.key -> the command's own default, instead of the setting's.

    Raises:
        ConfigError: the file is missing or malformed, a name is unknown, a value is out of range, or values contradict
            each other.
    """
    problems: list[str] = []
    given: dict[str, Given] = dict(defaults or {})
    if config is not None:
        given.update(_from_tree(_read_toml(config), config, problems))
    given.update(_from_environ(environ, problems))
    return _finish(given, overrides, flags, problems)


def load_saved(path: Path, overrides: Sequence[str] = (), flags: Mapping[str, Given] | None = None) -> Loaded:
    """Read the file that `save` wrote. `--set` and flags still override it. Raises `ConfigError` like `load`."""
    problems: list[str] = []
    try:
        tree = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no settings; give a file that `diloco up` saved")
    return _finish(_from_tree(tree, path, problems), overrides, flags, problems)


def save(settings: Settings, path: Path) -> None:
    """Write every effective setting as JSON, for `--settings`."""
    write_json(path, settings.model_dump(mode="json"))


def _finish(
    given: dict[str, Given], overrides: Sequence[str], flags: Mapping[str, Given] | None, problems: list[str]
) -> Loaded:
    given.update(_from_overrides(overrides, problems))
    given.update(flags or {})
    tree: dict[str, dict[str, object]] = {}
    for name, one in given.items():
        section, key = name.split(".")
        tree.setdefault(section, {})[key] = _read_quantity(name, one.value)
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        problems.extend(_explain(error, given))
    if problems:
        raise ConfigError("\n".join(problems))
    return Loaded(settings, given)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows editors begin a file with a byte-order mark
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = re.search(r"\s*\(at line (\d+), column (\d+)\)$", message)
        line = at[1] if at else str(text.count("\n") + 1)
        said = re.sub(r"\s*\(at [^()]*\)$", "", message)
        raise ConfigError(f"{path}:{line}: TOML error: {said}") from None


def _from_tree(tree: Mapping[str, Any], path: Path, problems: list[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    text = _read_text(path)
    for section, keys in tree.items():
        where = _whereabouts(path, text, section, None)
        if section not in _SECTIONS:
            problems.append(f"{where}: there is no section [{section}]{_did_you_mean(section, _SECTIONS)}")
        elif not isinstance(keys, dict):
            problems.append(f"{where}: {section} is a section; write [{section}] and its keys below")
        else:
            for key, value in keys.items():
                name, where = f"{section}.{key}", _whereabouts(path, text, section, key)
                if name in _FIELDS:
                    given[name] = Given(value, where)
                else:
                    problems.append(f"{where}: {_unknown(name)}")
    return given


def _whereabouts(path: Path, text: str, section: str, key: str | None) -> str:
    """`file:line` of a key, found by a plain search through the lines (tomllib keeps no positions)."""
    if path.suffix != ".toml":
        return str(path)
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            current = header[1]
            if key is None and current == section:
                return f"{path}:{number}"
        wanted = section if key is None else key if current == section else f"{section}.{key}"
        if re.match(rf"\s*{re.escape(wanted)}\s*=", line):
            return f"{path}:{number}"
    return str(path)


def _from_environ(environ: Mapping[str, str], problems: list[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for variable in sorted(v for v in environ if v.startswith(ENV_PREFIX)):
        name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
        if name in _FIELDS and variable == _variable(name):
            given[name] = Given(from_text(name, environ[variable].strip()), variable)
        else:
            hint = _did_you_mean(variable.upper(), [_variable(field) for field in _FIELDS])
            problems.append(f"the environment variable {variable} is not a setting{hint}")
    return given


def _variable(name: str) -> str:
    return ENV_PREFIX + name.replace(".", "__").upper()


def _from_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals:
            problems.append(f"--set {override}: write section.key=value, such as --set sync.quorum=2")
        elif name not in _FIELDS:
            problems.append(f"--set {override}: {_unknown(name)}")
        else:
            given[name] = Given(from_text(name, text.strip()), "--set")
    return given


def from_text(name: str, text: str) -> object:
    """The text of a variable or of `--set`, in a form that pydantic understands: tuples for lists, None for ""."""
    allowed = _FIELDS[name].annotation
    if get_origin(allowed) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if type(None) in get_args(allowed) and text.lower() in ("", "none"):
        return None
    return text


def _read_quantity(name: str, value: object) -> object:
    """Convert 2M, 30s and bf16 for pydantic. Leave other values for pydantic to judge."""
    if not isinstance(value, str):
        return value
    kinds = set(_kinds(_FIELDS[name].annotation))
    if Path in kinds:
        return os.path.expanduser(value)  # the shell expands no ~ in a file or after `--set section.key=`
    if name in ("sync.push", "sync.pull"):
        return units.dtype(value)
    parse: Callable[[str], float]
    if float in kinds and _is_time(name):
        parse = units.seconds
    elif int in kinds:
        parse = units.whole
    else:
        return value
    try:
        return parse(value)
    except ValueError:
        return value


def _kinds(annotation: object) -> Iterator[object]:
    if get_args(annotation) and get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def _is_time(name: str) -> bool:
    return name.endswith("_s") or name == "sync.grace"


# ---------------------------------------------------------------- explaining


_SECTIONS: dict[str, Any] = {section: field.annotation for section, field in Settings.model_fields.items()}
_FIELDS: dict[str, FieldInfo] = {
    f"{section}.{key}": field for section, model in _SECTIONS.items() for key, field in model.model_fields.items()
}


def _unknown(name: str) -> str:
    return f"there is no setting {name}{_did_you_mean(name, _FIELDS)}"


def _did_you_mean(word: str, known: Collection[str]) -> str:
    same_key = [name for name in known if name.rpartition(".")[2] == word.rpartition(".")[2]]
    return f"; did you mean {' or '.join(same_key)}?" if same_key else did_you_mean(word, known)


def _explain(error: ValidationError, given: Mapping[str, Given]) -> list[str]:
    """One line per wrong setting, and one per contradiction between settings of a section."""
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"][:2])
        if name in _FIELDS:
            one = given[name]
            lines[name] = f"{name} = {one.value} ({one.source}): must be {allowed(name)}"
        else:
            said = problem["msg"].removeprefix("Value error, ")
            involved = [n for n in given if n.startswith(f"{name}.") and n.split(".")[1] in said]
            origin = ", ".join(f"{n} = {given[n].value} ({given[n].source})" for n in involved)
            lines[f"{name}: {said}"] = f"{name}: {said}" + (f"; given: {origin}" if origin else "")
    return list(lines.values())


def allowed(name: str) -> str:
    """The allowed values of a setting, as text: "a whole number from 1 to 4096", "a number above 0 (seconds)"."""
    field = _FIELDS[name]
    unit = "seconds" if _is_time(name) else "tokens, such as 2M" if name == "run.tokens" else ""
    words = _allowed_type(field.annotation) + _allowed_range(field.metadata)
    return f"{words} ({unit})" if unit else words


def default_of(name: str) -> str:
    """The default of a setting as text; empty if it has none."""
    section, key = name.split(".")
    value = getattr(getattr(Settings(), section), key)
    return "" if value is None or value == () else str(value)


def _allowed_type(annotation: object) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        plain, *metadata = get_args(annotation)
        bounds = [bound for one in metadata for bound in getattr(one, "metadata", [one])]
        return _allowed_type(plain) + _allowed_range(bounds)
    if origin in (Union, types.UnionType):
        return " or ".join(_allowed_type(part) for part in get_args(annotation))
    if origin is Literal:
        choices = [f"'{choice}'" for choice in get_args(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin is tuple:
        return "a list, separated by commas"
    known: dict[object, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
        type(None): "none",
    }
    return known[annotation]


def _allowed_range(metadata: Sequence[Any]) -> str:
    bounds = {
        bound: value
        for part in metadata
        for bound in ("ge", "gt", "le", "lt", "pattern")
        if (value := getattr(part, bound, None)) is not None
    }
    if "pattern" in bounds:
        return f" like {bounds['pattern']}"
    if "ge" in bounds and "le" in bounds:
        return f" from {bounds['ge']} to {bounds['le']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    said = " and ".join(f"{words[bound]} {value}" for bound, value in bounds.items())
    return f" {said}" if said else ""
