"""The worker's own checkpoint: optimizer state, weights, the learner's state and the position in the data.

The shards' weights take precedence. Training starts from the weights in this file only while a shard is away.

It is one safetensors file: optimizer tensors as `parameter/key`, weights as `parameter/weights`, and metadata (the
model's shapes, the run, the progress) with a checksum over everything. It is written atomically. A damaged file is
reported and never loaded. No pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from diloco_common.errors import DataError
from diloco_common.wire.manifest import TensorSpec, differences

FORMAT = "diloco-worker-checkpoint-3"
_WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of one learner, over all its restarts."""

    inner_step: int = 0
    tokens: int = 0
    data_position: int = 0
    """`TokenStream.position`."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The contents of a checkpoint besides the model and the optimizer."""

    learner: Mapping[str, Any]
    """`Learner.state_dict`, for `join`."""
    progress: TrainingProgress


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, learner: Mapping[str, Any], data_position: int
) -> None:
    """Replace the checkpoint at `path`. After a crash, either the old or the new one is there.

    `learner`: its `state_dict`. Creates the folder if necessary. Raises OSError.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {
        f"{names[parameter]}/{key}": value.detach().cpu().contiguous()
        for parameter in names
        for key, value in {**optimizer.state.get(parameter, {}), _WEIGHTS: parameter}.items()
    }
    body = json.dumps(
        {
            "format": FORMAT,
            "optimizer": _kind(optimizer),
            "learner": dict(learner),
            "data_position": data_position,
            "model": {name: list(p.shape) for name, p in model.named_parameters()},
        },
        sort_keys=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, save(tensors, {"checkpoint": body, "crc32c": _checksum(body, tensors)}))


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, run_id: str) -> Saved | None:
    """Restore model and optimizer from `path`, and return the rest.

    None if there is no file. Raises DataError, and changes nothing, if the file is damaged or belongs to another run or
    model.
    """
    if not path.exists():
        return None
    content, tensors = _read(path)
    learner = content["learner"]
    if learner["run"] != run_id:
        raise DataError(
            f"{path} belongs to run {learner['run']!r}, but this is run {run_id!r}: "
            "use another worker.folder, or delete the file"
        )
    mine = [TensorSpec(name, tuple(p.shape)) for name, p in model.named_parameters()]
    theirs = [TensorSpec(name, tuple(shape)) for name, shape in content["model"].items()]
    if mine != theirs and (lines := differences(mine, theirs)):
        raise DataError(
            f"{path} belongs to another model (this one <-> the checkpoint):\n  "
            + "\n  ".join(lines)
            + "\ngive the settings that made it, or delete the file"
        )
    if (kind := content.get("optimizer", _kind(optimizer))) != _kind(optimizer):
        raise DataError(
            f"{path} was made with the optimizer {kind}, and this one is {_kind(optimizer)}: give the train.optimizer "
            "that made it, or delete the file to begin with a fresh one"
        )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors.pop(f"{name}/{_WEIGHTS}"))
    _put_back(optimizer, parameters, tensors)
    return Saved(learner, TrainingProgress(learner["inner_step"], learner["tokens"], content["data_position"]))


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _put_back(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    index = {parameter: i for i, parameter in enumerate(ordered)}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, key = name.rsplit("/", 1)
        state.setdefault(index[parameters[parameter]], {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error
    body = metadata.get("checkpoint", "")
    if metadata.get("crc32c") != _checksum(body, tensors):
        raise _damaged(path, "the checksum differs")
    content: dict[str, Any] = json.loads(body)
    if content["format"] != FORMAT:
        raise DataError(f"{path} has format {content['format']!r}, but this release reads {FORMAT!r}: delete the file")
    return content, tensors


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged ({why}): delete it to go on with a fresh optimizer")


def _checksum(body: str, tensors: Mapping[str, Tensor]) -> str:
    """CRC-32C, 8 hex digits, over the metadata and every tensor's name, dtype, shape and bytes, by name."""
    checksum: Any = google_crc32c.Checksum(body.encode())  # type: ignore[no-untyped-call]
    for name in sorted(tensors):
        tensor = tensors[name]
        checksum.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return str(checksum.hexdigest().decode())


def _for_its_owner_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb", opener=_for_its_owner_alone) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
