"""Writes the model for `pull` and `export`: in the form that its own library loads, or not at all.

The run uses the names of the module that joined. `--base` determines the names to write:

    an adapter's folder       the file that PEFT has written there
    a model of transformers   the library: it makes the model, reads the base into it, writes it, and reads it again
    another folder            its safetensors
    none                      the state_dict of the model that joined, as learners have declared it

Tensors kept from the base are compared with the checksums that learners declared for their frozen tensors.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from diloco_common.errors import ConfigError, DataError, some
from diloco_common.wire.messages import FrozenTensor
from diloco_deploy.checkpoint import Writing
from diloco_worker.core.names import canonical
from diloco_worker.global_model import GlobalModel, write_model
from diloco_worker.shell.frozen_tensors import checksum, values_of

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Suffixes of files that hold weights, or an index of weights: these files are not copied."""
PEFT = "base_model.model."
"""Prefix of the names in PEFT's file; a model with `add_adapter` has no such prefix."""
OR_ELSE = "save the model of a learner, after `finish`"


@dataclass(frozen=True)
class Loader:
    name: str
    wants: Mapping[str, Tensor]
    """Every name -> its values in the base; tied tensors share memory."""
    lacks: Collection[str] = ()
    """The names that the base lacks."""
    file: str = MODEL
    model: Any = None
    """A transformers model, which saves itself; `wants` shares its memory."""


def write(found: GlobalModel, how: Writing) -> tuple[Path, int]:
    """Write the model. Returns the file with its weights, and how many of these were not trained.

    Raises DataError if the loader has no place for a tensor of the run, or wants one that neither the run nor the base
    has, or the base does not match; and OSError. `out` is then unchanged.
    """
    dtype, base, strip = getattr(torch, how.dtype), how.base, how.strip and how.strip.rstrip(".") + "."
    tensors = {name: t if name in found.buffers else t.to(dtype) for name, t in found.tensors.items()}
    keys = found.keys if base is None else {name: name for name in tensors} | found.keys
    if base is not None and (base / "adapter_config.json").exists():
        keys, tensors = _prompts(base, keys, tensors)
    mine = {key.removeprefix(strip): name for key, name in keys.items() if key.startswith(strip)}
    frozen = {one.name.removeprefix(strip): one for one in found.frozen if one.name.startswith(strip)}
    told = {key: _told(one, dtype) for key, one in frozen.items()}
    known = {key: tensors[name] if name else told.get(key) for key, name in mine.items()}
    loader = _loader(base, dtype, known)
    places = _places(loader, mine, strip)
    values = {want: t for want, key in places.items() if (t := known[key]) is not None}
    fixed = {want: frozen[key] for want, key in places.items() if key in frozen and told[key] is None}
    other = {want for want, one in fixed.items() if _differs(one, loader.wants[want])}
    left_out = _check(loader, values, other, tensors.keys() - {mine[key] for key in places.values()}, how.partial)
    values = {want: t for want, t in values.items() if want not in left_out}
    alone = how.out.suffix == ".safetensors"
    into = how.out.parent if alone else how.out
    into.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pull-", dir=into) as folder:
        for path in base.iterdir() if base is not None else ():
            if path.is_file() and not path.name.endswith(WEIGHTS):
                shutil.copyfile(path, Path(folder, path.name))
        _save(loader, values, left_out, Path(folder))
        written = [path.replace(how.out if alone else into / path.name) for path in Path(folder).iterdir()]
    file = next(path for path in written if path.suffix == ".safetensors")
    return file, len(loader.wants.keys() - values.keys() - left_out)


def _places(loader: Loader, mine: Mapping[str, str], strip: str) -> dict[str, str]:
    """Wanted name -> the learners' key for it. `mine`: key, without `strip` -> tensor of the run, or "".

    A model may be inside another module, whose names precede its own, and PEFT's file omits the adapter's name. The
    mapping that places the most tensors is used. Raises DataError if there are several.
    """
    wants = {want.removeprefix(PEFT) if loader.file == ADAPTER else want: want for want in loader.wants}
    in_order = sorted(mine, key=lambda key: mine[key] != "")  # shared tensors win
    ways = {("", "")}
    for key in filter(mine.get, mine):
        for adapter in ("", *key.split(".")) if loader.file == ADAPTER else ("",):
            short = _without(adapter, key)
            ends = [i + 1 for i, letter in enumerate(short) if letter == "."]
            ways |= {(short[:end], adapter) for end in (0, *ends) if short[end:] in wants}
    found = []
    for off, adapter in sorted(ways):
        placed = {wants.get(_without(adapter, key).removeprefix(off), ""): key for key in in_order}
        placed.pop("", None)
        found.append((sum(mine[key] != "" for key in placed.values()), off, placed))
    most = max(count for count, _, _ in found)
    best = {off: {want: key for want, key in placed.items() if mine[key]} for n, off, placed in found if n == most}
    if any(placed != next(iter(best.values())) for placed in best.values()):
        several = " and ".join(repr(strip + off) for off in best)
        raise DataError(f"this model is in the run several times, under {several}: name one, such as --strip PREFIX")
    return next(placed for count, _, placed in found if count == most)


def _without(adapter: str, key: str) -> str:
    """The key as PEFT writes it."""
    if not adapter:
        return key
    short = ".".join(part for part in key.split(".") if part not in (adapter, "modules_to_save"))
    return short.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _told(frozen: FrozenTensor, dtype: torch.dtype) -> Tensor | None:
    """The values of a frozen tensor, if learners have sent them."""
    values = values_of(frozen)
    return values.to(dtype) if values is not None and values.is_floating_point() else values


def _differs(frozen: FrozenTensor, values: Tensor) -> bool:
    """Whether learners are known to hold values other than the base's; unknown, so False, if the base was rounded."""
    dtype = getattr(torch, frozen.form.partition(" ")[0], None)
    if frozen.crc32c is None or values.is_meta or not isinstance(dtype, torch.dtype):
        return False
    is_exact = values.dtype == dtype or (values.dtype == torch.float32 and dtype.itemsize < 4)
    return is_exact and checksum(values.to(dtype)) != frozen.crc32c


def _check(loader: Loader, values: Mapping[str, Tensor], other: set[str], lost: set[str], is_partial: bool) -> set[str]:
    """Check that tensors and places match. Returns the names left out. Raises DataError, unless `is_partial`."""
    same, wants = canonical(loader.wants), loader.wants
    differing = {same[want] for want in other}
    other = {want for want in wants if same[want] in differing}
    odd = {want for want, t in values.items() if wants[want].shape != t.shape}
    has = {same[want] for want in values}
    lacking = {want for want in loader.lacks if same[want] not in has}
    facts = {
        "has other shapes: {}": {f"{w} {list(wants[w].shape)}, not {list(values[w].shape)}" for w in odd},
        "has other values than the learners: {}": other,
        "has no place for {}, of the run": lost,
        "wants {}, which the run does not have": lacking,
    }
    words = [f"{loader.name} {says.format(some(sorted(names)))}" for says, names in facts.items() if names]
    if words and not is_partial:
        raise DataError(
            f"{'; '.join(words)}. Give as --base the folder of the very model that was trained, as its library saves "
            "it (save_pretrained, or safetensors.torch.save_model); --strip PREFIX, if that is a part of what joined; "
            f"--partial, to do without these; or {OR_ELSE}"
        )
    for line in words:
        print(f"--partial: {line}", file=sys.stderr)
    return lacking | odd | other


# ------------------------------------------------------------------ loaders


def _loader(base: Path | None, dtype: torch.dtype, mine: Mapping[str, Tensor | None]) -> Loader:
    """The loader that `base` determines. `mine`: key -> values, or None if the run has none. Raises DataError."""
    if base is None:
        return _taking("the state_dict of the model", mine)
    name, config = f"the model of --base {base}", base / "config.json"
    with _library(base):
        if (base / "adapter_config.json").exists():
            return Loader(name, load_file(base / ADAPTER), file=ADAPTER)
        files = [base / MODEL] if (base / MODEL).exists() else sorted(base.glob("*.safetensors"))
        if named := json.loads(config.read_text()).get("architectures") if config.exists() else None:
            import transformers

            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            if kind := getattr(transformers, named[0], None):
                if not files and not list(base.glob("pytorch_model*.bin")):
                    model = kind(kind.config_class.from_pretrained(base)).to(dtype)
                    return Loader(name, model.state_dict(), model.state_dict(), model=model)
                model, info = kind.from_pretrained(base, dtype=dtype, output_loading_info=True, local_files_only=True)
                return Loader(name, model.state_dict(), info["missing_keys"], model=model)
        wants = {key: tensor for path in files for key, tensor in load_file(path).items()}
        return Loader(name, wants, file=files[0].name if len(files) == 1 else MODEL) if files else _taking(name, mine)


def _taking(name: str, mine: Mapping[str, Tensor | None]) -> Loader:
    """A loader that takes exactly the learners' tensors."""
    wants = {key: torch.empty(0, device="meta") if t is None else t for key, t in mine.items()}
    return Loader(name, wants, {key for key, t in mine.items() if t is None})


def _save(loader: Loader, values: Mapping[str, Tensor], left_out: Collection[str], folder: Path) -> None:
    """Raises DataError."""
    if loader.model is None:  # safetensors does not accept shared memory
        written = {key: t.clone() for key, t in {**loader.wants, **values}.items() if key not in left_out}
        write_model(folder / loader.file, written)
        return
    for key, value in values.items():
        loader.wants[key].copy_(value)
    written = {key: value for key, value in loader.wants.items() if key not in left_out}
    with _library(folder):
        loader.model.save_pretrained(folder, state_dict=dict(written), max_shard_size="1000TB")
        loaded = type(loader.model).from_pretrained(folder, local_files_only=True).state_dict()
    for path in folder.glob("*.safetensors"):  # safetensors 0.8 makes them readable by their owner only
        path.chmod((folder / "config.json").stat().st_mode)
    if wrong := {k for k, v in (written | dict(values)).items() if not torch.equal(loaded[k], v.to(loaded[k].dtype))}:
        raise DataError(
            f"{some(sorted(wrong))}: transformers would load other values than were trained, so nothing was written. "
            "If the model of --base ties tensors that the run trained apart, untie them in its config.json"
        )


def _prompts(base: Path, keys: dict[str, str], tensors: dict[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Replace a prompt encoder's parameters by its output, which PEFT saves."""
    for before in {key.partition("prompt_encoder.")[0] for key in keys if "prompt_encoder." in key}:
        inside = {key: name for key, name in keys.items() if key.startswith(f"{before}prompt_encoder.")}
        if not all(inside.values()):
            continue  # a part of it is frozen, and not available here
        state = {key.split("prompt_encoder.")[1].partition(".")[2]: tensors[name] for key, name in inside.items()}
        values = state["embedding.weight"]
        if len(state) > 1:
            with _library(base), torch.no_grad():
                from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftConfig

                config = PeftConfig.from_pretrained(str(base))
                config.inference_mode = False
                kind: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
                encoder = kind(config).eval()
                encoder.load_state_dict(state)
                values = encoder(torch.arange(len(values))[None])[0].to(values.dtype)
        prompts, gone = f"{before}prompt_embeddings", set(inside.values())
        keys = {key: name for key, name in keys.items() if name not in gone} | {prompts: prompts}
        tensors = {name: t for name, t in tensors.items() if name not in gone} | {prompts: values}
    return keys, tensors


@contextmanager
def _library(folder: Path) -> Iterator[None]:
    """Turn a library's exceptions into one-line errors. Raises ConfigError and DataError."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{folder} asks for {error.name}, which is not installed here: pip install {error.name}"
        ) from None
    except Exception as error:  # of any kind
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(f"{folder}: its library says: {why}. Save it with save_pretrained, or {OR_ELSE}") from error
