"""Options shared by commands: those of the settings, and bounded numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

from diloco_common import units
from diloco_common.errors import ConfigError
from diloco_common.settings import Settings
from diloco_common.settings_loader import Given, Loaded, default_of, from_text, load, load_saved

_SETTINGS = Group("Settings", sort_key=12)
_FLAGS = {"data.source": "--data", "run.id": "--run"}
"""Setting -> its option, if the option is not named after the key."""

Flag = Annotated[bool, Parameter(show_default=False)]
Json = Annotated[bool, Parameter(help="print it as JSON", show_default=False)]


Config = Annotated[Path | None, Parameter(metavar="FILE.toml", help="settings of the run")]


@Parameter(name="*", group=_SETTINGS)
@dataclass(frozen=True)
class SettingsOptions:
    """--config, --set and --settings, for every command that takes settings."""

    config: Config = None
    set: Annotated[
        list[str] | None,
        Parameter(metavar="SECTION.KEY=VALUE", help="one setting, such as sync.quorum=2; may be repeated"),
    ] = None
    settings: Annotated[
        Path | None,
        Parameter(
            metavar="FILE.json", help="every setting as `diloco up` saved them; the environment is then not read"
        ),
    ] = None


NO_SETTINGS = SettingsOptions()


def setting(name: str, metavar: str, about: str, default: object = None) -> Parameter:
    """The option of one setting. Its value stays text until all settings are checked together.

    `default`: the command's own default, instead of the setting's.
    """
    shown = default_of(name) if default is None else str(default)
    return Parameter(name=_flag(name), metavar=metavar, help=f"{about} ({name})", show_default=shown or False)


def load_from(
    options: SettingsOptions,
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Given] | None = None,
) -> Loaded:
    """The settings of a command line, with their sources. Prints the settings that the environment decided.

    Args:
        options: the shared options.
        flags: setting -> the value of its own option; None if it was not given.
        environ: the environment; default: the process's.
        defaults: see `settings_loader.load`.

    Raises:
        ConfigError: see `settings_loader.load`.
    """
    explicit = {
        name: Given(from_text(name, str(value)), _flag(name)) for name, value in flags.items() if value is not None
    }
    overrides = options.set or ()
    if options.settings is not None:
        if options.config is not None:
            raise ConfigError(
                "--settings and --config exclude each other: --settings holds every setting; leave out --config"
            )
        return load_saved(options.settings, overrides, explicit)
    loaded = load(options.config, os.environ if environ is None else environ, overrides, explicit, defaults)
    for line in loaded.describe_sources():
        print(line, file=sys.stderr)
    return loaded


def settings_from(
    options: SettingsOptions,
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Given] | None = None,
) -> Settings:
    """Like `load_from`, but without the sources."""
    return load_from(options, flags, environ, defaults).settings


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.rpartition('.')[2].replace('_', '-')}")


def refuse_idle(given: Mapping[str, object], idle: Mapping[str, str]) -> None:
    """Refuse flags that would change nothing. Raises ConfigError.

    Args:
        given: flag -> its value; None if it was not given.
        idle: flag -> why it would change nothing here, and what to do.
    """
    for flag, why in idle.items():
        if given.get(flag) is not None:
            raise ConfigError(f"{flag} would change nothing: {why}")


# ---------------------------------------------------------------- values


def number(parse: Callable[[str], float], low: float, high: float, words: str) -> Callable[[Any, Sequence[Token]], Any]:
    """A converter that accepts numbers from `low` to `high`, and refuses others with `words`."""

    def convert(_: Any, tokens: Sequence[Token]) -> float:
        try:
            value = parse(tokens[0].value)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ValueError(f"must be {words}")
        return value

    return convert


def _dtype(_: Any, tokens: Sequence[Token]) -> str:
    found = units.dtype(tokens[0].value)
    if found not in ("float32", "bfloat16", "float16"):
        raise ValueError("must be one of float32, bfloat16 (bf16), float16 (fp16)")
    return found


Dtype = Annotated[Literal["float32", "bfloat16", "float16"], Parameter(converter=_dtype)]
"""The dtype of a model file; short names such as bf16 are accepted."""
Days = Annotated[float, Parameter(converter=number(float, 0.01, 3650, "days, from 0.01 to 3650"), metavar="N")]
