"""One arm of a comparison: all settings of the product, and the conditions for its runs.

An arm is a TOML file: the usual settings, and the conditions in a table `lab`:

    [train]
    optimizer = "adamw"
    [lab]
    learners = 8
    speeds = [1.1, 1.0, 0.9, 0.2]
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from diloco_common.errors import ConfigError, did_you_mean
from diloco_common.extensions import find, is_extension
from diloco_common.settings import Section, Settings, TrainSettings
from diloco_demo.training import Decays
from diloco_server.shell.rules import find_rules

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
    """Validate `tree` as a `model`. Raises ConfigError, with a line for each mistake.

    `where` names the file or arm in messages. `section` is the name of the table if `tree` is not a whole file.
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
    """The names of sections and of their settings."""
    names = []
    for key, field in model.model_fields.items():
        names.append(f"{section}.{key}" if section else key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += _names(field.annotation, names[-1])
    return names


class LabTrain(TrainSettings):
    """The inner optimizer, with the values that are constants in the node's built-in training (`Decays`)."""

    weight_decay: float = Field(default=Decays.weight_decay, ge=0)
    beta1: float = Field(default=Decays.beta1, ge=0, lt=1)
    beta2: float = Field(default=Decays.beta2, ge=0, lt=1)
    muon_momentum: float = Field(default=Decays.muon_momentum, ge=0, lt=1)


def decays_of(train: TrainSettings) -> Decays:
    """The decays in the lab's settings, or else the constants."""
    if not isinstance(train, LabTrain):
        return Decays()
    return Decays(train.weight_decay, train.beta1, train.beta2, train.muon_momentum)


class LabSettings(Settings):
    """The settings of the node, and those of `LabTrain`."""

    train: LabTrain = LabTrain()


LEARNT_FROM = ("run", "sync", "outer", "guard", "model", "train", "data")
"""The sections of settings that affect training."""
VERSIONS = 40
"""Default budget of a run, in versions of each fragment."""


class Conditions(Section):
    """The conditions of a run."""

    method: Literal["decoupled", "data-parallel", "classic", "one-process"] = "decoupled"
    """"decoupled": the production cores. The others are references that share no code with the cores. "data-parallel":
    one model that steps on the batches of all learners. "classic": synchronous DiLoCo in float32. "one-process":
    `batches` batches of one learner per step. For one learner with outer steps, use "decoupled" with `learners` 1."""
    learners: int = Field(default=4, ge=1, le=256)
    shards: int = Field(default=2, ge=1, le=64)
    speeds: tuple[float, ...] = ()
    """Relative speed of each learner. Empty: all have speed 1."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Each step time varies randomly by up to this share."""
    delay: float = Field(default=0.0, ge=0)
    """Delay that is added to every push and every new version, in inner steps."""
    drop: float = Field(default=0.0, ge=0, lt=1)
    """Share of pushes that are lost and sent again after `retry`."""
    retry: float = Field(default=12.0, ge=0)
    """In inner steps. A real learner sends again 0.2 s after a failed call, and 15 s after one that gets no answer."""
    kill_every: float = Field(default=0.0, ge=0)
    """Versions between two deaths; 0: no deaths. Learners die in turn, and lose all that was in their process."""
    away: float = Field(default=24.0, gt=0)
    """Inner steps until a dead learner is back, with the global model and new optimizer state."""
    non_iid: float = Field(default=0.0, ge=0, le=1)
    """How much the learners' data differ. 0: all draw from all the data. 1: each draws from its own part."""
    batches: int = Field(default=1, ge=1)
    """Batches per step of "one-process"."""


@dataclass(frozen=True)
class Arm:
    """Settings and conditions to compare with those of other arms."""

    name: str
    settings: LabSettings
    """As given by the user."""
    conditions: Conditions
    model: str = ""
    """mypkg.mymod:build. Empty: the built-in model."""

    def seeded(self, seed: int) -> LabSettings:
        """The settings of one run. The default budget is 40 versions of each fragment."""
        settings, run, train = self.settings, self.settings.run, self.settings.train
        per_step = self.conditions.learners * train.batch * settings.model.context
        tokens = run.tokens or VERSIONS * settings.sync.first_every * per_step
        return settings.model_copy(update={"run": run.model_copy(update={"seed": seed, "tokens": tokens})})

    def facts(self, seed: int) -> dict[str, Any]:
        """Everything on which the result of a run depends, as JSON."""
        settings = self.seeded(seed)
        content = settings.model_dump(mode="json")
        learnt = {key: content[key] for key in LEARNT_FROM}
        conditions = self.conditions.model_dump(mode="json")
        return {"settings": learnt, "lab": conditions, "model": self.model, "rules": self._sources(settings)}

    def _sources(self, settings: LabSettings) -> dict[str, str]:
        """Setting -> name and source digest of the extension. If its file is edited, the run counts as a new one."""
        learners = {"train.optimizer": ("diloco.inner", settings.train.optimizer), "model": ("diloco.task", self.model)}
        found = {
            what: f"{name} {find(group, name).source}" for what, (group, name) in learners.items() if is_extension(name)
        }
        return find_rules(settings).sources | found

    def key(self, seed: int) -> str:
        """A key that is equal for equal runs, whatever the names of their arms."""
        return _digest(self.facts(seed))

    def with_value(self, path: str, value: Any) -> Arm:
        """The same arm with one setting changed, such as train.lr or lab.noise. Raises ConfigError."""
        content = self.settings.model_dump(mode="python", exclude_unset=True)
        lab = self.conditions.model_dump(exclude_unset=True)
        section, _, key = path.partition(".")
        (lab if section == "lab" else content.setdefault(section, {}))[key] = value
        return make_arm(f"{self.name} {path}={value}", {**content, "lab": lab}, self.model)


GONE = {
    "sync.sync_every_min": 6, "sync.sync_every_max": 500, "sync.grace_gamma": 0.8, "sync.cadence": "steps",
    "sync.buffers_every": 1, "sync.blend_alpha": 0.5, "sync.on_commit": "carry", "sync.error_feedback": True,
    "outer.beta1": 0.9, "outer.beta2": 0.99, "outer.eps": 1e-8,
    "train.decay": 0.5, "data.held_out": 0.05, "guard.norm_factor": 1000.0, "guard.norm_window": 64,
    "guard.quarantine_s": 60.0, "shard.durability": "version", "shard.max_learners_per_host": 512,
    "train.schedule": "linear", "train.lr_final": 0.0, "sync.patience": 0.1, "sync.overlap_steps": 2,
    "train.clip": 1.0,
}  # fmt: skip
"""Settings that were removed since results were recorded -> the constant that replaced each."""


def without_gone(recorded: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Recorded settings without those that were removed, if they had the value of today's constant."""
    return {
        name: {key: value for key, value in section.items() if GONE.get(f"{name}.{key}", GONE) != value}
        for name, section in recorded.items()
    }


def key_today(line: Mapping[str, Any]) -> str:
    """The key of a recorded result. Settings that are newer than the result get their defaults, which change nothing.
    Removed settings are ignored if they had the value of today's constant; else this raises ValidationError. Raises
    KeyError if the line lacks a part."""
    settings = LabSettings.model_validate(without_gone(line["settings"])).model_dump(mode="json")
    learnt = {key: settings[key] for key in LEARNT_FROM}
    conditions = Conditions.model_validate(line["lab"]).model_dump(mode="json")
    return _digest({"settings": learnt, "lab": conditions, "model": line["model"], "rules": line["rules"]})


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def make_arm(name: str, content: dict[str, Any], model: str = "") -> Arm:
    """Make an arm from the tables of a file. Raises ConfigError."""
    rest = dict(content)
    conditions = validated(Conditions, rest.pop("lab", {}), name, "lab")
    settings = validated(LabSettings, rest, name)
    if conditions.speeds and len(conditions.speeds) != conditions.learners:
        raise ConfigError(f"{name}: lab.speeds has {len(conditions.speeds)} entries for {conditions.learners} learners")
    if model and not settings.run.tokens:
        raise ConfigError(f"{name}: set run.tokens, the budget of a run with a model of your own")
    if settings.train.average_momentum and conditions.method != "decoupled":
        raise ConfigError(
            f"{name}: train.average_momentum has no effect with lab.method = {conditions.method}, a reference without "
            'averaged momentum: remove it, or take lab.method = "decoupled"'
        )
    return Arm(name, settings, conditions, model)


def load_arm(path: Path, model: str = "") -> Arm:
    """Read an arm from a TOML file. The arm is named after the file. Raises ConfigError."""
    return make_arm(path.stem, read_toml(path), model)
