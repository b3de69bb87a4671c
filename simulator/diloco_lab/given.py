"""What the user gives the lab: TOML files, and how their mistakes are told in the words of the settings."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from diloco_common.errors import ConfigError, did_you_mean

M = TypeVar("M", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: TOML error: {error}") from None


def validated(model: type[M], tree: Mapping[str, Any], where: str, section: str = "") -> M:
    """`tree` as a `model`. Raises ConfigError, with a line for each mistake.

    `where` is the file or the arm; `section`, the table that the tree is, if it is not the whole file.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in _lines(error, model, section))) from None


def _lines(error: ValidationError, model: type[BaseModel], section: str) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        name = ".".join([*([section] if section else []), *map(str, problem["loc"])])
        if problem["type"] == "extra_forbidden":
            yield f"there is no setting {name}{did_you_mean(name, _names(model, section))}"
        elif problem["type"] == "missing":
            yield f"{name} is missing"
        elif problem["type"] == "value_error":
            yield f"{name}: {problem['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        else:
            yield f"{name} = {problem['input']}: {problem['msg'].replace('Input should be', 'must be')}"


def _names(model: type[BaseModel], section: str) -> list[str]:
    """Of sections, and of what stands in them."""
    names = []
    for key, field in model.model_fields.items():
        names.append(f"{section}.{key}" if section else key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += _names(field.annotation, names[-1])
    return names
