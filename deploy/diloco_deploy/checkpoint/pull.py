"""`diloco pull`: writes the global model of a running cluster into a folder that `from_pretrained` reads.

The run holds the trainable parameters and the buffers, and knows the further names of those that are tied. Everything
else comes from a folder that the user gives: configuration and tokenizer, and, out of its weights, what is frozen.
Where that folder is an adapter's, as PEFT writes it, the file is one of an adapter too.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from diloco_common import quantities
from diloco_common.errors import ConfigError, DataError
from diloco_common.options import Dtype, number
from diloco_deploy import units
from diloco_deploy.run.folder import shards_in

if TYPE_CHECKING:
    from torch import Tensor

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Endings of files that hold weights, or say which do: these are not copied."""


_SECONDS = number(quantities.seconds, 0.0, 86_400.0, "seconds, from 0 to 86400, such as 5s")


def pull(
    *,
    out: Annotated[Path, Parameter(metavar="DIR", help="folder to write; files in it are replaced")],
    shards: Annotated[str | None, Parameter(metavar="HOST:PORT,...", help="addresses of all shards")] = None,
    folder: Annotated[
        Path | None, Parameter(metavar="PATH", help="instead: folder of the cluster that `diloco up` runs")
    ] = None,
    base: Annotated[
        Path | None,
        Parameter(
            metavar="DIR",
            help="folder of the model that was trained: configuration and tokenizer are copied from it, and weights "
            "that the run does not train are taken from its safetensors",
        ),
    ] = None,
    dtype: Annotated[Dtype, Parameter(help="of the parameters")] = "float32",
    average: Annotated[
        bool, Parameter(negative=(), help="the average of the versions, where the run keeps one (outer.average)")
    ] = False,
    run: Annotated[
        str | None, Parameter(metavar="ID", help="id of the run", show_default="that of the folder, or local")
    ] = None,
    tls: Annotated[Path | None, Parameter(metavar="FOLDER", help="an observer's or learner's certificate")] = None,
    token_file: Annotated[
        Path | None, Parameter(metavar="FILE", help="file with a bearer token, if the shards ask")
    ] = None,
    wait: Annotated[float, Parameter(converter=_SECONDS, metavar="5s", help="how long to wait for shards")] = 5.0,
) -> int:
    """Pull the latest version of every fragment from the shards, without joining, and write the model into a folder as
    safetensors, under all names that tied parameters have.
    """
    if (shards is None) == (folder is None):
        raise ConfigError("give --shards or --folder, one of them: diloco pull --folder runs/local --out model")
    if base is not None and not base.is_dir():
        raise DataError(f"--base {base}: no such folder; give the one that holds config.json")
    if folder is not None:
        here = shards_in(folder)
        shards, run, tls = ",".join(here.addresses), run or here.run, tls or here.tls
    from diloco_worker.export import write_model
    from diloco_worker.global_model import pull_global_model
    from diloco_worker.shell.credentials import addresses_of

    began, addresses = time.perf_counter(), addresses_of(shards or "")
    found = pull_global_model(
        addresses, run=run or "local", tls=tls, bearer_token=token_file, wait_s=wait, average=average
    )
    tensors = {name: t if name in found.buffers else _converted(t, dtype) for name, t in found.tensors.items()}
    trained = sum(tensor.numel() for name, tensor in tensors.items() if name not in found.buffers)
    tensors |= {name: tensors[of].clone() for name, of in found.ties.items() if of in tensors}
    is_adapter = base is not None and (base / "adapter_config.json").exists()
    if is_adapter:
        tensors = {adapter_name(name): tensor for name, tensor in tensors.items()}
    elif base is not None:
        tensors |= {name: tensor for name, tensor in _weights_in(base) if name not in tensors}
    file = out / (ADAPTER if is_adapter else MODEL)
    write_model(file, tensors)
    if base is not None:
        _copy_rest(base, out)
    low, high = min(found.versions.values()), max(found.versions.values())
    versions = ("average up to " if average else "") + (
        f"version {low}" if low == high else f"versions {low} to {high}"
    )
    size = units.size(file.stat().st_size)
    print(
        f"{file}: {units.count(trained)} parameters as {dtype}, {versions} of {len(found.versions)} fragments, "
        f"{units.count(found.tokens_merged)} tokens merged, {size}, in {time.perf_counter() - began:.2f} s"
    )
    return 0


def adapter_name(name: str) -> str:
    """The name that PEFT gives a parameter of an adapter in its file: without that of the adapter, "default"."""
    return name.replace(".modules_to_save.default.", ".").replace(".default.", ".").removesuffix(".default")


def _converted(tensor: Tensor, dtype: str) -> Tensor:
    import torch

    return tensor.to(getattr(torch, dtype))


def _weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """What the safetensors of a model hold, in one file or several. Raises DataError."""
    from safetensors import SafetensorError, safe_open

    index = folder / f"{MODEL}.index.json"
    files = [folder / MODEL] if (folder / MODEL).exists() else []
    if not files and index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from None


def _copy_rest(source: Path, target: Path) -> None:
    """Configuration, tokenizer and the like: all files but weights. Raises DataError."""
    if source.resolve() == target.resolve():
        return
    try:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(WEIGHTS):
                shutil.copyfile(path, target / path.name)
    except OSError as error:
        raise DataError(f"{error.filename or target}: {error.strerror or error}") from None
