"""What `pull` and `export` write: a model that its own library loads as what was trained, or nothing.

The run has the names of the module that joined. Which names a loader takes, `--base` says:

    an adapter's folder       the file that PEFT has written there; of LoRA, its configuration is enough
    a model of transformers   the library: it makes the model, reads the base into it, writes it, and reads it again
    another folder            its safetensors
    none                      the state_dict of the model that joined, as learners have declared it

A loader takes a file with the names and the shapes of one that it has taken before. What of the base stays is compared
with the checksums of what learners hold fixed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco_common.errors import ConfigError, DataError
from diloco_common.wire.messages import FrozenTensor
from diloco_deploy.checkpoint.options import Writing
from diloco_worker.core.names import canonical
from diloco_worker.export import write_model
from diloco_worker.global_model import GlobalModel
from diloco_worker.shell.frozen_tensors import checksum

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Endings of files that hold weights, or say which do: these are not copied."""
PEFT = "base_model.model."
"""How names of a PeftModel begin. Those of `model.add_adapter` do not, but in the file they do."""
SHOWN = 5
"""Names in a message."""
OR_ELSE = "save the model of a learner, after `finish`"

Save: TypeAlias = Callable[[dict[str, Tensor], Collection[str], Path], None]


@dataclass(frozen=True)
class Loader:
    """What takes the model."""

    name: str
    wants: Mapping[str, Tensor]
    """Every name -> the values of the base; tied ones share their memory."""
    lacks: Collection[str]
    """What of it the base does not have."""
    save: Save
    """Writes these, and what it wants but for the names that are left out, into a folder."""


def write(found: GlobalModel, how: Writing) -> tuple[Path, int]:
    """Write the model. Returns the file with its weights, and how many of these are of the base.

    Raises DataError where a tensor of the run has no place with the loader, or the loader wants one that neither the
    run nor the base has, or the base is another one. `out` is then as it was.
    """
    base, dtype, strip = how.base, getattr(torch, how.dtype), how.strip and how.strip.rstrip(".") + "."
    tensors = {name: t if name in found.buffers else t.to(dtype) for name, t in found.tensors.items()}
    keys = found.keys if base is None else {name: name for name in tensors} | found.keys
    is_adapter = base is not None and (base / "adapter_config.json").exists()
    if base is not None and is_adapter:
        loader, (keys, tensors) = _of_adapter(base, keys, tensors, strip), _prompts(base, keys, tensors)
    elif base is not None and (kind := _class_of(base)):
        loader = _of_transformers(kind, base, dtype)
    elif base is not None and (files := _safetensors(base)):
        loader = _of_files(base, files)
    else:
        loader = _of_learners(keys, tensors, strip)
    places = _places(keys, loader.wants, strip, is_adapter)
    frozen = {tensor.name: tensor for tensor in found.frozen}
    other = [name for name, key in places.items() if key in frozen and _differs(frozen[key], loader.wants[name])]
    places = {name: keys[key] for name, key in places.items() if keys[key]}
    left_out = _check(loader, places, other, tensors, how.partial)
    values = {name: tensors[of] for name, of in places.items() if name not in left_out}
    alone = how.out.suffix == ".safetensors"
    into = how.out.parent if alone else how.out
    try:
        into.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".pull-", dir=into) as name:
            folder = Path(name)
            for path in base.iterdir() if base is not None else ():
                if path.is_file() and not path.name.endswith(WEIGHTS):
                    shutil.copyfile(path, folder / path.name)
            loader.save(values, left_out, folder)
            written = [path.replace(how.out if alone else into / path.name) for path in folder.iterdir()]
    except OSError as error:
        raise DataError(f"{error.filename or into}: {error.strerror or error}") from None
    file = next(path for path in written if path.suffix == ".safetensors")
    return file, len(loader.wants.keys() - values.keys() - left_out)


# ------------------------------------------------------------------ which tensor is which


def _places(keys: Mapping[str, str], wants: Collection[str], strip: str, is_adapter: bool) -> dict[str, str]:
    """Wanted name -> the key of what the learners have there.

    A model may sit in another module, whose names come before its own. In PEFT's file each name begins as that of a
    PeftModel, and is without the adapter's. Of all ways, the one is taken that gives most tensors a place. Raises
    DataError if there are several.
    """
    in_order = sorted(keys, key=lambda key: keys[key] != "")  # what is shared wins
    mine = {key.removeprefix(strip): key for key in in_order if key.startswith(strip)}
    ways = {("", "", "")}
    for key in (key for key, of in mine.items() if keys[of]):
        for adapter in ("", *key.split(".")) if is_adapter else ("",):
            short = _without(adapter, key)
            for off in ["", *(short[: i + 1] for i, letter in enumerate(short) if letter == ".")]:
                ways |= {(off, put, adapter) for put in ("", PEFT) if put + short.removeprefix(off) in wants}
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for off, put, adapter in sorted(ways):
        placed = {put + _without(adapter, key).removeprefix(off): of for key, of in mine.items()}
        found[off, put, adapter] = {key: of for key, of in placed.items() if key in wants}
    shared = {way: {key: of for key, of in placed.items() if keys[of]} for way, placed in found.items()}
    most = max(map(len, shared.values()))
    best = [way for way, placed in shared.items() if len(placed) == most]
    if any(shared[way] != shared[best[0]] for way in best):
        several = " and ".join(sorted({repr(strip + way[0]) for way in best}))
        raise DataError(f"this model is in the run several times, under {several}: name one, such as --strip PREFIX")
    return found[best[0]]


def _without(adapter: str, key: str) -> str:
    """As PEFT writes it."""
    if not adapter:
        return key
    short = ".".join(part for part in key.split(".") if part not in (adapter, "modules_to_save"))
    return short.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _differs(frozen: FrozenTensor, values: Tensor) -> bool:
    """Whether learners hold other values than the base, as far as can be told: not, where these were rounded."""
    dtype = getattr(torch, frozen.form.partition(" ")[0], None)
    if frozen.crc32c is None or values.is_meta or not isinstance(dtype, torch.dtype):
        return False
    is_exact = values.dtype == dtype or (values.dtype == torch.float32 and dtype.itemsize < 4)
    return is_exact and checksum(values.to(dtype)) != frozen.crc32c


def _check(
    loader: Loader, places: Mapping[str, str], other: list[str], tensors: Mapping[str, Tensor], is_partial: bool
) -> set[str]:
    """Every tensor of the run has its place, and every place its tensor. Returns the names that are left out.

    Raises DataError, unless it is to be a part.
    """
    same = canonical(loader.wants)
    odd = [key for key, name in places.items() if loader.wants[key].shape != tensors[name].shape]
    shapes = [f"{key} {list(loader.wants[key].shape)}, not {list(tensors[places[key]].shape)}" for key in odd]
    lost = tensors.keys() - places.values()
    has = {same[key] for key in places}
    lacking = {key for key in loader.lacks if same[key] not in has}
    facts = {
        "has other shapes: {}": shapes,
        "has other values than the learners: {}": other,
        f"has no place for {{}}, of {len(tensors)} tensors of the run": lost,

        "wants {}, which the run does not have": lacking,
    }  # fmt: skip
    words = [f"{loader.name} {says.format(_shown(sorted(names)))}" for says, names in facts.items() if names]
    if words and not is_partial:
        raise DataError(
            f"{'; '.join(words)}. Give as --base the folder of the very model that was trained, as its library saves "
            f"it; --strip PREFIX, if that is a part of what joined; --partial, to do without these; or {OR_ELSE}"
        )
    for line in words:
        print(f"--partial: {line}", file=sys.stderr)
    return lacking.union(odd)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# ------------------------------------------------------------------ who loads it


def _of_learners(keys: Mapping[str, str], tensors: Mapping[str, Tensor], strip: str) -> Loader:
    nothing = torch.empty(0, device="meta")
    mine = {key.removeprefix(strip): name for key, name in keys.items() if key.startswith(strip)}
    wants = {key: tensors.get(name, nothing) for key, name in mine.items()}
    lacks = {key for key, name in mine.items() if not name}
    return Loader("the state_dict of the model", wants, lacks, _saving(MODEL, {}))


def _of_files(base: Path, files: Sequence[Path]) -> Loader:
    """Raises DataError."""
    wants: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                wants |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"{path}: cannot be read: {error}. It says which names are loaded: have it saved (save_pretrained)"
            ) from None
    name = files[0].name if len(files) == 1 else MODEL
    return Loader(f"the model of --base {base}", wants, (), _saving(name, wants))


def _of_adapter(base: Path, keys: Mapping[str, str], tensors: Mapping[str, Tensor], strip: str) -> Loader:
    """PEFT's file; where there is a configuration alone, what is known for sure of LoRA. Raises DataError."""
    mine = {key.removeprefix(strip): tensors[name] for key, name in keys.items() if name and key.startswith(strip)}
    parts = [key.split(".") for key in mine]
    adapters = [{b for a, b in pairwise(p) if a.startswith("lora_") or a == "modules_to_save"} for p in parts]
    names = set[str]().union(*adapters)
    frozen = any("lora_" in key or ".modules_to_save." in key for key, name in keys.items() if not name)
    if (
        frozen
        or (base / ADAPTER).exists()
        or len(names) != 1
        or not all(adapters)
        or not all(k.startswith(PEFT) for k in mine)
    ):
        return _of_files(base, [base / ADAPTER])
    adapter = names.pop()
    wants = {_without(adapter, key): tensor for key, tensor in mine.items()}
    return Loader(f"the adapter of --base {base}", wants, (), _saving(ADAPTER, {}))


def _saving(name: str, base: Mapping[str, Tensor]) -> Save:
    def save(values: dict[str, Tensor], left_out: Collection[str], folder: Path) -> None:
        # safetensors wants memory of its own for each
        write_model(folder / name, {k: t.clone() for k, t in {**base, **values}.items() if k not in left_out})

    return save


def _safetensors(base: Path) -> list[Path]:
    """The files of its weights, one or those that an index lists."""
    index = base / f"{MODEL}.index.json"
    if (base / MODEL).exists() or not index.exists():
        return [base / MODEL] if (base / MODEL).exists() else sorted(base.glob("*.safetensors"))
    return [base / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _prompts(base: Path, keys: dict[str, str], tensors: dict[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """With what a prompt encoder gives, which PEFT saves, in the place of its parameters."""
    encoders: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for key, name in keys.items():
        before, found, after = key.partition("prompt_encoder.")
        if found:
            encoders[before + "prompt_embeddings"][after.partition(".")[2]] = name
    for prompts, names in encoders.items():
        if "" in names.values():
            continue  # a part of it is frozen, and nobody has it here
        state = {leaf: tensors[name] for leaf, name in names.items()}
        values = state["embedding.weight"]
        if len(state) > 1:
            with _library("PEFT", base), torch.no_grad():
                from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftConfig

                config = PeftConfig.from_pretrained(str(base))
                config.inference_mode = False
                kind: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
                encoder = kind(config).eval()
                encoder.load_state_dict(state)
                values = encoder(torch.arange(len(values))[None])[0].to(values.dtype)
        keys = {key: name for key, name in keys.items() if name not in names.values()} | {prompts: prompts}
        tensors = {name: t for name, t in tensors.items() if name not in names.values()} | {prompts: values}
    return keys, tensors


def _class_of(base: Path) -> Any:
    """The class of transformers that config.json names, if it does. Raises ConfigError and DataError."""
    try:
        config = json.loads((base / "config.json").read_text())
        named = config.get("architectures")
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise DataError(f"{base / 'config.json'}: {error}") from None
    if not named:
        return None
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"--base {base} is a model of transformers, which is not installed here: pip install 'decoupled-diloco[hf]'"
        ) from None
    return getattr(transformers, named[0], None)


def _of_transformers(kind: Any, base: Path, dtype: torch.dtype) -> Loader:
    """Raises DataError."""
    with _library("transformers", base):
        if _safetensors(base) or list(base.glob("pytorch_model*.bin")):
            model, info = kind.from_pretrained(base, dtype=dtype, output_loading_info=True, local_files_only=True)
            lacks = info["missing_keys"]
        else:
            with torch.device("meta"):
                model = kind(kind.config_class.from_pretrained(base))
            model.to_empty(device="cpu").to(dtype).tie_weights()
            lacks = model.state_dict().keys()
    wants = model.state_dict()

    def save(values: dict[str, Tensor], left_out: Collection[str], folder: Path) -> None:
        for key, value in values.items():
            wants[key].copy_(value)
        written = {key: value for key, value in wants.items() if key not in left_out}
        with _library("transformers", base):
            model.save_pretrained(folder, state_dict=dict(written), max_shard_size="1000TB")
            loaded = kind.from_pretrained(folder, local_files_only=True).state_dict()
            for path in folder.glob("*.safetensors"):  # safetensors (0.8) makes them for their owner alone
                path.chmod((folder / "config.json").stat().st_mode)
        expected = written | values
        if wrong := sorted(k for k, v in expected.items() if not torch.equal(loaded[k], v.to(loaded[k].dtype))):
            raise DataError(
                f"{_shown(wrong)}: transformers would load other values than were trained, so nothing was written. If "
                "the model of --base ties what the run trained apart, change that in its config.json"
            )

    return Loader(f"the model of --base {base}", wants, lacks, save)


@contextmanager
def _library(name: str, folder: Path) -> Iterator[None]:
    """Quiet, and what it raises is one line. Raises DataError."""
    try:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
    except Exception as error:  # of any kind
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(f"{folder}: {name} cannot write it ({why}); {OR_ELSE}") from error
