"""Models drawn at random, trained by two learners, pulled, and loaded by their own library.

    python tests/contract/round_trip.py --draws 200 --seed 7

Of each draw comes one of these; with anything silent, the script ends with 1:

    equal        the library's own call gives the model that `finish` left
    partial      as far as --partial was given, and what is left out was said
    refused      `diloco pull` says what is wrong, and what to do
    silent       anything else
    impossible   the libraries cannot train it; it does not count
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import peft
import torch
import transformers
from in_process import InProcessShard, LoopThread, settings_with
from safetensors.torch import load_file, save_file
from torch import nn

import diloco_worker
from diloco_common.command import main as diloco
from diloco_common.wire.bounds import FROZEN_BYTES_MAX
from diloco_worker.core.shared_set import as_module
from diloco_worker.shell import frozen_tensors

VOCABULARY, LENGTH, BATCH, STEPS = 64, 8, 2, 4
_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_PAIR = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 0,
}  # fmt: skip
_PICTURE = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("text", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "GPT2ForSequenceClassification": ("class", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "GPTNeoXForCausalLM": ("text", {}),
    "OPTForCausalLM": ("text", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "BloomForCausalLM": ("text", {"n_layer": 2, "n_head": 2}),
    "LlamaForCausalLM": ("text", {}),
    "MistralForCausalLM": ("text", {}),
    "Qwen2ForCausalLM": ("text", {"tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("text", {}),
    "Gemma2ForCausalLM": ("text", {}),
    "PhiForCausalLM": ("text", {}),
    "MixtralForCausalLM": ("text", _MOE),
    "Qwen3MoeForCausalLM": ("text", _MOE),
    "OlmoeForCausalLM": ("text", _MOE),
    "BertForMaskedLM": ("text", {}),
    "BertForSequenceClassification": ("class", {}),
    "RobertaForMaskedLM": ("text", {"max_position_embeddings": 40}),
    "DistilBertForMaskedLM": ("text", {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}),
    "AlbertForMaskedLM": ("text", {"embedding_size": 16}),
    "ElectraForMaskedLM": ("text", {"embedding_size": 16}),
    "T5ForConditionalGeneration": (
        "pair",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
    ),
    "BartForConditionalGeneration": ("pair", _PAIR),
    "MarianMTModel": ("pair", _PAIR),
    "ViTForImageClassification": ("picture", _PICTURE),
    "ConvNextForImageClassification": (
        "picture", _PICTURE | {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2},
    ),
    "ResNetForImageClassification": (
        "picture", _PICTURE | {"depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8, "layer_type": "basic"},
    ),
    **dict.fromkeys(
        (
            "FalconForCausalLM", "Phi3ForCausalLM", "StableLmForCausalLM", "GraniteForCausalLM", "MambaForCausalLM",
            "Olmo2ForCausalLM", "CohereForCausalLM", "DebertaV2ForMaskedLM", "GptOssForCausalLM", "PhimoeForCausalLM",
            "GraniteMoeForCausalLM", "HeliumForCausalLM",
        ),
        ("text", _MOE),
    ),
    **dict.fromkeys(("LlamaForSequenceClassification", "DebertaV2ForSequenceClassification"), ("class", {})),
    **dict.fromkeys(("PegasusForConditionalGeneration", "BlenderbotForConditionalGeneration"), ("pair", _PAIR)),
    "DeiTForImageClassification": ("picture", _PICTURE),
    "SwinForImageClassification": (
        "picture", _PICTURE | {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    ),
}  # fmt: skip
ADAPTERS = (
    "lora", "dora", "pissa", "adalora", "lokr", "oft", "lora with biases", "lora with a head", "loha", "ia3", "vera",
    "ln", "tokens", "prompt", "prefix", "projected prefix", "p-tuning", "add_adapter",
    *sorted(kind.value for kind in peft.PEFT_TYPE_TO_CONFIG_MAPPING),  # with the defaults of each
)  # fmt: skip
WRAPPERS = (
    "none", "none", "none", "module", "module", "nested", "nested", "dict", "list", "with a loss", "two", "compiled",
    "parallel",
)  # fmt: skip
FROZEN = ("nothing", "nothing", "embeddings", "half")
FORMATS = (
    "safetensors",
    "safetensors",
    "sharded",
    "sharded",
    "bin",
    "bin",
    "config",
    "file",
    "none",
    "headless",
    "another",
)


@dataclass(frozen=True)
class Draw:
    """What is trained, and how it is pulled."""

    family: str
    adapter: str
    name: str
    """Of the adapter."""
    wrapper: str
    frozen: str
    dtype: str
    pulled: str
    base: str
    flags: str
    is_large: bool = False
    """What is frozen does not travel, as if it were more than 64 KiB."""


def draw(chance: random.Random) -> Draw:
    adapter = chance.choice(("none", "none", "none", *ADAPTERS))
    return Draw(
        chance.choice(list(FAMILIES)), adapter, chance.choice(("default", "mine")), chance.choice(WRAPPERS),
        chance.choice(FROZEN), chance.choice(("float32", "float32", "bfloat16")),
        chance.choice(("float32", "float32", "bfloat16")),
        chance.choice((*["safetensors"] * 8, "none", "config") if adapter != "none" else FORMATS),
        chance.choice(("", "", "--partial", "--strip")), chance.choice((True, False)),
    )  # fmt: skip


class Wrapper(nn.Module):
    """As a LightningModule keeps a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class WithLoss(Wrapper):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.criterion = nn.Linear(1, 1)


def family(drawn: Draw, seed: int = 0) -> Any:
    """The untrained model, always the same."""
    torch.manual_seed(seed)
    kind, more = getattr(transformers, drawn.family), FAMILIES[drawn.family][1]
    known = kind.config_class().to_dict()
    given = {key: value for key, value in _SMALL.items() if key in known}
    off = {key: 0.0 for key in known if "drop" in key and isinstance(known[key], float)}
    model = kind(kind.config_class(**off | given | more))
    return model.to(getattr(torch, drawn.dtype))


def adapted(drawn: Draw) -> Any:
    """With its adapter."""
    model = family(drawn)
    if drawn.adapter == "none":
        return model
    linear = [n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D") and "router" not in n]
    some = sorted({n.rpartition(".")[2] for n in linear if "layer" in n or ".h." in n or "block" in n})[:2]
    kind = {"text": "CAUSAL_LM", "class": "SEQ_CLS", "pair": "SEQ_2_SEQ_LM"}.get(FAMILIES[drawn.family][0])
    prompt = {"num_virtual_tokens": 3, "task_type": kind}
    config = {
        "lora": lambda: peft.LoraConfig(r=2, target_modules=some),
        "add_adapter": lambda: peft.LoraConfig(r=2, target_modules=some),
        "dora": lambda: peft.LoraConfig(r=2, target_modules=some, use_dora=True),
        "lora with biases": lambda: peft.LoraConfig(r=2, target_modules=some, bias="all"),
        "lora with a head": lambda: peft.LoraConfig(
            r=2, target_modules=some, modules_to_save=[linear[-1].rpartition(".")[2]]
        ),
        "pissa": lambda: peft.LoraConfig(r=2, target_modules=some, init_lora_weights="pissa"),
        "adalora": lambda: peft.AdaLoraConfig(init_r=2, target_modules=some, total_step=100),
        "lokr": lambda: peft.LoKrConfig(r=2, target_modules=some),
        "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=some),
        "loha": lambda: peft.LoHaConfig(r=2, target_modules=some),
        "ia3": lambda: peft.IA3Config(target_modules=some, feedforward_modules=[]),
        "vera": lambda: peft.VeraConfig(r=2, target_modules=some[:1]),
        "ln": lambda: peft.LNTuningConfig(
            target_modules=sorted(
                {n.rpartition(".")[2] for n, m in model.named_modules() if "Norm" in type(m).__name__}
            )[:1]
        ),
        "tokens": lambda: peft.LoraConfig(r=2, target_modules=some, trainable_token_indices=[1, 2]),
        "prompt": lambda: peft.PromptTuningConfig(**prompt),
        "prefix": lambda: peft.PrefixTuningConfig(**prompt),
        "projected prefix": lambda: peft.PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=8, **prompt),
        "p-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=8, **prompt),
    }.get(drawn.adapter, lambda: peft.PEFT_TYPE_TO_CONFIG_MAPPING[drawn.adapter](target_modules=some))()
    torch.manual_seed(1)
    if drawn.adapter == "add_adapter":
        model.add_adapter(config, adapter_name=drawn.name)
        return model
    return peft.get_peft_model(model, config, adapter_name=drawn.name)


def freeze(drawn: Draw, model: nn.Module) -> None:
    training = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for i, (name, parameter) in enumerate(training):
        if (drawn.frozen == "half" and i % 2) or (drawn.frozen == "embeddings" and "emb" in name):
            parameter.requires_grad_(False)


def joined(drawn: Draw, model: nn.Module) -> Any:
    """What the learner joins, around the model."""
    return {
        "none": lambda: model, "module": lambda: Wrapper(model), "nested": lambda: Wrapper(Wrapper(model)),
        "dict": lambda: {"policy": model}, "list": lambda: [model], "with a loss": lambda: WithLoss(model),
        "two": lambda: {"actor": model, "critic": family(drawn, seed=3)},
        "compiled": lambda: torch.compile(model), "parallel": lambda: nn.DataParallel(model),
    }[drawn.wrapper]()  # fmt: skip


def batch(drawn: Draw, generator: torch.Generator) -> dict[str, torch.Tensor]:
    kind = FAMILIES[drawn.family][0]
    if kind == "picture":
        pixels = torch.randn(BATCH, 3, 16, 16, generator=generator).to(getattr(torch, drawn.dtype))
        return {"pixel_values": pixels, "labels": torch.randint(0, 4, (BATCH,), generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens[:, 0] % 2 if kind == "class" else tokens}


def logits(drawn: Draw, model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found = model(**batch(drawn, torch.Generator().manual_seed(9))).logits
    model.train()
    return found.float()


def train(drawn: Draw, address: str) -> tuple[Any, torch.Tensor]:
    """Two learners until the budget is merged. Returns the first one's model after `finish`, and logits of before."""
    models = [adapted(drawn) for _ in range(2)]
    tops = []
    for model in models:
        freeze(drawn, model)
        tops.append(joined(drawn, model))
    before = logits(drawn, models[0])
    learners = [
        diloco_worker.join(address, top, learner_id=f"learner-{i}", wait_s=30, log=None) for i, top in enumerate(tops)
    ]
    every = [[p for p in as_module(top).parameters() if p.requires_grad] for top in tops]
    optimizers = [torch.optim.AdamW(parameters, lr=3e-2) for parameters in every]
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    for _ in range(2000):
        if all(learner.done for learner in learners):
            break
        for learner, model, optimizer, generator, parameters in zip(
            learners, models, optimizers, generators, every, strict=True
        ):
            if learner.done:
                continue
            loss = model(**batch(drawn, generator)).loss
            for parameter in parameters:  # those that the loss does not see move, too
                loss = loss + (parameter.float() ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(BATCH, loss.detach())
    for learner in learners:
        ended = learner.finish()
        assert ended.is_global, ended
    return models[0], before


def make_base(drawn: Draw, folder: Path) -> None:
    """The folder that the user began with."""
    model = family(drawn, seed=5) if drawn.base == "another" else adapted(drawn)
    if drawn.adapter != "none":
        model.save_pretrained(folder)
        if drawn.name != "default" and (folder / drawn.name).is_dir():
            for path in (folder / drawn.name).iterdir():
                shutil.move(path, folder / path.name)
        if drawn.base == "config":
            (folder / "adapter_model.safetensors").unlink()
    elif drawn.base == "file":
        folder.mkdir()
        save_file(
            {name: t.clone().contiguous() for name, t in model.state_dict().items()}, folder / "weights.safetensors"
        )
    elif drawn.base == "headless":
        model.base_model.save_pretrained(folder)
    else:
        model.save_pretrained(folder, **({"max_shard_size": "8KB"} if drawn.base == "sharded" else {}))
        if drawn.base in ("bin", "config"):
            (folder / "model.safetensors").unlink()
        if drawn.base == "bin":
            torch.save(model.state_dict(), folder / "pytorch_model.bin")


def load(drawn: Draw, out: Path, flags: list[str]) -> Any:
    """By the library's own call. Raises what it raises; AssertionError where it draws something at random."""
    kind = getattr(transformers, drawn.family)
    weights = next(out.glob("*.safetensors"))
    if drawn.base == "none":
        model = adapted(drawn)
        whole = model if "--strip" in flags or not strip(drawn) else as_module(joined(drawn, model))
        whole.load_state_dict(load_file(weights), strict=True)
        return model
    if drawn.base == "file":
        model = family(drawn)
        model.load_state_dict(load_file(weights), strict=True)
        return model
    if drawn.adapter == "add_adapter":
        model = family(drawn)
        model.load_adapter(str(out), adapter_name=drawn.name)
        return model
    if drawn.adapter != "none":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = peft.PeftModel.from_pretrained(family(drawn), str(out), adapter_name=drawn.name)
        missing = [str(w.message) for w in said if "missing" in str(w.message).lower()]
        assert not missing, missing
        return model
    model, info = kind.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"], info
    return model.to(getattr(torch, drawn.dtype))


def run(drawn: Draw, loop: LoopThread) -> tuple[str, str]:
    exact = {"push": "float32", "pull": "float32", "quorum": "all", "fragments": 2, "sync_every": 2}
    frozen_tensors.FROZEN_BYTES_MAX = 0 if drawn.is_large else FROZEN_BYTES_MAX
    shard = InProcessShard(loop, settings_with(run={"tokens": 2 * STEPS * BATCH}, sync=exact)).start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            base, out = Path(folder, "base"), Path(folder, "out")
            try:
                alone = adapted(drawn)
                freeze(drawn, alone)
                alone(**batch(drawn, torch.Generator())).loss.backward()
                if drawn.base != "none":
                    make_base(drawn, base)
                if drawn.adapter != "none" and drawn.base != "none":
                    peft.PeftConfig.from_pretrained(base)  # some (IA3's defaults) do not take what they wrote
            except Exception as error:  # a combination that the libraries do not have, or that trains nothing
                return "impossible", f"{type(error).__name__}: {error}".splitlines()[0]
            model, before = train(drawn, shard.address)
            want = logits(drawn, rounded(drawn, model))  # rounding may send a token to other experts
            flags = {"": [], "--partial": ["--partial"], "--strip": ["--strip", strip(drawn), "--partial"]}[drawn.flags]
            based = [] if drawn.base == "none" else ["--base", str(base)]
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = diloco(
                    ["pull", "--shards", shard.address, "--out", str(out), "--dtype", drawn.pulled, *based, *flags]
                )
            words = said.getvalue().strip()
            if code:
                helps = code == 3 and any(word in words for word in ("--partial", "--strip", "save_pretrained"))
                return ("refused" if helps else "silent"), words
            lost = [names.split(", ") for names in re.findall(r"no place for (.*?)(?: and \d+ more)?, of", words)]
            is_less = " wants " in words or " other values " in words
            if is_less or any(name.startswith(strip(drawn)) for names in lost for name in names):
                return "partial", words  # as was asked for, and said
            try:
                loaded = load(drawn, out, flags)
                got = logits(drawn, loaded)
            except Exception as error:
                return "silent", f"{words}\n{type(error).__name__}: {error}"[:2000]
            moved, off = float((want - before).abs().max()), float((got - want).abs().max())
            is_exact = drawn.pulled == drawn.dtype == "float32"
            near = moved * (1e-3 if is_exact else 0.15) + (1e-5 if is_exact else float(want.abs().max()) / 128)
            other = differences(model, loaded, rounded=drawn.pulled == "bfloat16")
            words = f"moved {moved:.3g}, off {off:.3g}, other {other}; {words}"
            return ("equal" if off <= near and not other else "silent"), words
    finally:
        shard.stop()
        frozen_tensors.FROZEN_BYTES_MAX = FROZEN_BYTES_MAX


def rounded(drawn: Draw, model: Any) -> Any:
    """A copy with the values of the file that is written: of an adapter on a base, what is trained."""
    copy, through = deepcopy(model), getattr(torch, drawn.pulled)
    if drawn.adapter == "none" or drawn.base == "none":
        return copy.to(through).to(getattr(torch, drawn.dtype))
    for parameter in copy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(through).to(parameter.dtype)
    return copy


def differences(mine: nn.Module, loaded: nn.Module, *, rounded: bool) -> list[str]:
    """Names of tensors with other values. A prompt encoder is another module once it is loaded."""
    theirs = loaded.state_dict()
    return [
        name
        for name, values in mine.state_dict().items()
        if name in theirs and theirs[name].shape == values.shape and "prompt_encoder" not in name
        if not torch.allclose(theirs[name].to(values.dtype).double(), values.double(), rtol=rounded / 128, atol=0)
    ]


def strip(drawn: Draw) -> str:
    inside = {
        "module": "model.", "nested": "model.model.", "dict": "policy.", "list": "0.", "with a loss": "model.",
        "two": "actor.",
    }  # fmt: skip
    return inside.get(drawn.wrapper, "")


def draws(count: int, seed: int, tell: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """The same draws for the same seed. Returns how often what came of them."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found: Counter[str] = Counter()
    chance, loop = random.Random(seed), LoopThread()
    try:
        while found.total() - found["impossible"] < count:
            drawn = draw(chance)
            try:
                what, words = run(drawn, loop)
            except Exception:
                what, words = "silent", traceback.format_exc()
            found[what] += 1
            tell(
                f"{what}: {' '.join(f'{key}={value!r}' for key, value in asdict(drawn).items() if value)}\n    {words}"
            )
    finally:
        loop.close()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    counted = draws(given.draws, given.seed, lambda line: print(line, flush=True))
    kinds = {"equal": "equal", "partial": "in part, as asked for", "refused": "refused", "silent": "silent"}
    print(f"{given.draws} draws: " + ", ".join(f"{counted[kind]} {words}" for kind, words in kinds.items()))
    sys.exit(counted["silent"] > 0)
