"""Which settings learn best, and what decoupling costs: the runs behind docs/quality.md.

    python benchmarks/quality.py                 # run what is missing, rebuild the tables and the plot
    python benchmarks/quality.py --page          # only rebuild

benchmarks/results/quality.jsonl keeps the results of the tables for AdamW and Muon, one run per line with all of its
settings; no run is repeated. A run is deterministic and takes one core for 10 to 170 s. The other tables show what
`diloco lab` has written down. Each is between `<!-- NAME -->` and `<!-- end -->` in the page, and the text around it is
written by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from diloco_common.allocator import tune_allocator
from diloco_common.codec import CHUNK_ELEMENTS_MAX, num_payload_bytes
from diloco_common.settings import Settings
from diloco_demo.data import load_corpus
from diloco_demo.gpt import GPT, evaluate
from diloco_lab import runner
from diloco_lab.arms import Conditions, load_arm
from diloco_lab.lockstep import LockstepOutcome, LockstepRun
from diloco_lab.protocol import carried_out, gaps, load_protocol
from diloco_lab.references import classic_diloco, data_parallel
from diloco_lab.report import gap
from diloco_lab.tasks import BuiltIn

ROOT = Path(__file__).resolve().parent.parent
PAGE, PLOT = ROOT / "docs" / "quality.md", ROOT / "docs" / "quality.png"
RESULTS = ROOT / "benchmarks" / "results" / "quality.jsonl"
PROTOCOL = ROOT / "benchmarks" / "quality_protocol.toml"
EVALUATION_TOKENS = 131_072
CURVE_TOKENS = 16_384
CURVE_POINTS = 12
SEEDS_MAX = 1000
"""More than anybody ran."""
SHORT, MIDDLE, LONG = 491_520, 983_040, 1_966_080
"""Token budgets: with 4 learners and H = 24, 20, 40 and 80 versions of each fragment."""

# ------------------------------------------------------------ a run


@dataclass(frozen=True)
class Spec:
    """One run. The defaults here do not follow those of the product. `tokens`: merged tokens of all learners."""

    method: str = "decoupled"
    """"decoupled" (the production cores), "classic" or "data-parallel" (the references)."""
    learners: int = 4
    tokens: int = SHORT
    seed: int = 0
    optimizer: str = "adamw"
    schedule: str = "cosine"
    lr_final: float = 0.1
    merge: str = "rda"
    push: str = "int8"
    pull: str = "bfloat16"
    momentum: float = 0.0
    layers: int = 2
    width: int = 64
    context: int = 64
    batch: int = 4

    def settings(self) -> Settings:
        return Settings.model_validate({
            "run": {"tokens": self.tokens, "seed": self.seed},
            "sync": {
                "fragments": 24, "sync_every": 24, "quorum": 1, "grace": "adaptive", "overlap_steps": 2,
                "on_commit": "carry", "error_feedback": True, "merge": self.merge, "push": self.push, "pull": self.pull,
            },
            "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": self.momentum},
            "model": {
                "layers": self.layers, "heads": self.width // 32, "width": self.width, "context": self.context,
            },
            "train": {
                "batch": self.batch, "optimizer": self.optimizer, "lr": 2e-3, "muon_lr": 5e-3,
                "schedule": self.schedule, "lr_final": self.lr_final,
            },
        })  # fmt: skip


def run(spec: Spec) -> dict[str, object]:
    """Train, and evaluate the global model: nats per byte on held-out text."""
    torch.set_num_threads(1)
    tune_allocator()
    settings = spec.settings()
    corpus = load_corpus("stdlib")
    task = BuiltIn(settings, corpus=corpus)
    curve: list[tuple[float, float]] = []

    def loss_of(model: nn.Module, max_tokens: int = EVALUATION_TOKENS) -> float:
        assert isinstance(model, GPT)
        return evaluate(model, corpus.held_out, spec.context, max_tokens=max_tokens)

    def watch(progress: float, model: Callable[[], nn.Module]) -> None:
        if progress >= (len(curve) + 1) / CURVE_POINTS - 1e-9 and progress < 1:
            loss = loss_of(model(), CURVE_TOKENS)
            curve.append((round(progress, 4), round(loss, 4)))

    began = time.perf_counter()
    first = loss_of(task.model())
    if spec.method == "decoupled":
        lockstep = LockstepRun(settings, task, Conditions(learners=spec.learners, shards=2))
        outcome = lockstep.run(lambda progress: watch(progress, lockstep.global_model))
        model = lockstep.global_model()
    else:
        reference = {"classic": classic_diloco, "data-parallel": data_parallel}[spec.method]
        model = reference(settings, task, spec.learners, lambda progress, model: watch(progress, lambda: model))
        outcome = LockstepOutcome(tokens_trained=spec.tokens)
    final = loss_of(model)
    return {
        "eval_loss_first": round(first, 4), "eval_loss_final": round(final, 4), "curve": curve,
        "wall_s": round(time.perf_counter() - began, 1), **asdict(outcome),
    }  # fmt: skip


Results = Mapping[Spec, Mapping[str, Any]]


def load() -> dict[Spec, dict[str, object]]:
    results = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        entry = json.loads(line)
        results[Spec(**entry["spec"])] = entry["result"]
    return results


def run_missing(specs: Sequence[Spec], results: dict[Spec, dict[str, object]]) -> None:
    missing = [spec for spec in dict.fromkeys(specs) if spec not in results]
    for i, spec in enumerate(missing, 1):
        results[spec] = result = run(spec)
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as out:
            out.write(json.dumps({"spec": asdict(spec), "result": result}) + "\n")
        print(f"[{i}/{len(missing)}] {result['eval_loss_final']} {result['wall_s']} s {spec}", flush=True)


# ------------------------------------------------------------ what the page shows


@dataclass(frozen=True)
class Table:
    """Losses in nats per byte, mean over `seeds`, and how far each is above another."""

    head: str
    rows: Mapping[str, Sequence[Spec]]
    """Label, which may hold several cells separated by | -> a run per column of losses."""
    seeds: Sequence[int] = (0,)
    above_first_row: bool = False
    """Or above the first column."""

    def specs(self) -> list[Spec]:
        return [replace(spec, seed=seed) for row in self.rows.values() for spec in row for seed in self.seeds]

    def render(self, results: Results) -> str:
        lines = [f"| {self.head} |", "| --- |" + " ---: |" * self.head.count("|")]
        first = next(iter(self.rows.values()))
        for label, specs in self.rows.items():
            losses = [self._loss(spec, results) for spec in specs]
            cells = [label, *(f"{loss:.3f}" for loss in losses)]
            base = self._loss(first[0], results) if self.above_first_row else losses[0]
            if self.above_first_row or len(losses) == 2:
                above = f"{100 * (losses[-1] / base - 1):+.1f} %"
                cells.append("" if self.above_first_row and specs is first else above)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _loss(self, spec: Spec, results: Results) -> float:
        return fmean(results[replace(spec, seed=seed)]["eval_loss_final"] for seed in self.seeds)


CHOSEN = Spec(momentum=0.5, tokens=MIDDLE)
CLASSIC = Spec(method="classic", momentum=0.9, tokens=MIDDLE)
PARALLEL = Spec(method="data-parallel", tokens=MIDDLE)
DEMO = Spec(learners=3, tokens=1_000_000, layers=4, width=128, context=128, batch=8)
ENCODINGS = [
    ("float32", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16"), ("int8", "int8"), ("int8", "int4"),
    ("int4", "int8"),
]  # fmt: skip
CURVES = {
    "data-parallel": PARALLEL,
    "ours (momentum 0.5)": CHOSEN,
    "ours, momentum 0.9": replace(CHOSEN, momentum=0.9),
    "classic DiLoCo, float32, 0.9": CLASSIC,
}


def size(push: str, pull: str) -> float:
    """Bytes per parameter of a large fragment, up plus down."""
    return sum(num_payload_bytes(encoding, CHUNK_ELEMENTS_MAX) for encoding in (push, pull)) / CHUNK_ELEMENTS_MAX


TABLES = {
    "table: classic": Table(
        "outer rate | momentum | float32 classic DiLoCo | ours | above",
        {f"0.7 | {mu:g}": [replace(s, momentum=mu) for s in (CLASSIC, CHOSEN)] for mu in (0.0, 0.5, 0.9)},
        seeds=(0, 1),
    ),
    "table: length": Table(
        "momentum | 20 versions | 40 versions | 80 versions | demo model, 14 versions",
        {
            f"{mu:g}": [replace(spec, momentum=mu) for spec in (Spec(), CHOSEN, replace(CHOSEN, tokens=LONG), DEMO)]
            for mu in (0.0, 0.5, 0.9)
        },
    ),
    "table: bytes": Table(
        "push | pull | bytes per parameter | loss | above the first",
        {f"{up} | {down} | {size(up, down):.2f}": [replace(CHOSEN, push=up, pull=down)] for up, down in ENCODINGS},
        seeds=(0, 1, 2),
        above_first_row=True,
    ),
}


def all_specs() -> list[Spec]:
    """Every run that the page shows, once."""
    shown = [spec for table in TABLES.values() for spec in table.specs()]
    lengths = [replace(PARALLEL, tokens=tokens) for tokens in (SHORT, MIDDLE, LONG)]
    return list(dict.fromkeys([*shown, *lengths, *CURVES.values()]))


def _filled(text: str, place: re.Match[str]) -> str:
    return f"{place[1]}\n{text}\n\n{place[2]}"


def rebuilt(page: str, results: Results) -> str:
    """The page with all of its tables."""
    texts = {name: table.render(results) for name, table in TABLES.items()} | {"protocol": protocol_table()}
    texts["arms"] = arms_table()
    for name, text in texts.items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page = re.sub(mark, partial(_filled, text), page, flags=re.DOTALL)
    return page


def protocol_table() -> str:
    """The gaps that the protocol has found. `diloco lab protocol` prints the values that won, too, and every doubt."""
    lines = runner.load(RESULTS.with_name("quality_protocol.jsonl"))
    cells, report = carried_out(load_protocol(PROTOCOL), lines)
    return gaps(cells, report) if report else "No seed is reported yet."


@dataclass(frozen=True)
class Shown:
    """A folder of arms of `diloco lab compare`."""

    folder: str
    results: str
    """benchmarks/results/quality_RESULTS.jsonl"""
    base: str = ""
    """What all are held against,"""
    pairs: Sequence[tuple[str, str]] = ()
    """or which against which."""
    title: str = ""
    """What the run is called; else by its arm."""


FOLDERS = [
    Shown("disturbed", "disturbed", base="undisturbed"),
    Shown("frequency", "frequency", title="int4 int8, H = 12", pairs=[("four_h12", "four_h12_int8")]),
    Shown("momentum", "protocol", base="as_it_is"),
    Shown("asynchronous", "async", base="carry_and_grace"),
    Shown(
        "longer",
        "longer",
        title="640 versions",
        pairs=[("ours", "data_parallel_muon"), ("ours", "data_parallel_adamw")],
    ),
]


def arms_table() -> str:
    """What the arms of all folders have come to so far."""
    head = ["| run | loss | held against | its loss | above it, 95 % | contributions a round |"]
    head.append("| --- | ---: | --- | ---: | ---: | ---: |")
    return "\n".join([*head, *(row for shown in FOLDERS for row in arms_rows(shown))])


def arms_rows(shown: Shown) -> Iterator[str]:
    """The arms of a folder, in pairs of one seed."""
    lines = runner.load(RESULTS.parent / f"quality_{shown.results}.jsonl")
    arms = {path.stem: load_arm(path) for path in sorted((ROOT / "benchmarks" / shown.folder).glob("*.toml"))}
    for name, base in shown.pairs or [(name, shown.base) for name in arms if name != shown.base]:
        arm, other = arms[name], arms[base]
        seeds = [seed for seed in range(SEEDS_MAX) if {arm.key(seed), other.key(seed)} <= lines.keys()]
        if (found := gap(arm, other, seeds, lines)) is None:
            continue
        loss, its_loss = (fmean(lines[of.key(seed)]["result"]["loss"] for seed in seeds) for of in (arm, other))
        merged = [lines[arm.key(seed)]["result"].get("participants", math.nan) for seed in seeds]
        a_round = "" if math.isnan(merged[0]) else f"{fmean(merged):.2f}"
        run = shown.title or _words(name)
        yield f"| {run} | {loss:.4f} | {_words(base)} | {its_loss:.4f} | {found} | {a_round} |"


def _words(name: str) -> str:
    return name.replace("_", " ")


def draw(results: Results, path: Path) -> None:
    """Held-out loss over tokens, and final loss over the number of versions for each momentum."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for label, spec in CURVES.items():
        result = results[spec]
        points = [*result["curve"], (1.0, result["eval_loss_final"])]
        left.plot([spec.tokens / 1e6 * x for x, _ in points], [y for _, y in points], marker=".", label=label)
    left.set(xlabel="million tokens, all learners together", ylabel="held-out loss, nats per byte", ylim=(None, 3.4))
    left.legend()
    for momentum in (0.0, 0.5, 0.9):
        specs = [replace(CHOSEN, tokens=tokens, momentum=momentum) for tokens in (SHORT, MIDDLE, LONG)]
        losses = [results[s]["eval_loss_final"] for s in specs]
        right.plot([results[s]["versions"] for s in specs], losses, marker="o", label=f"momentum {momentum:g}")
    parallel = [results[replace(PARALLEL, tokens=tokens)]["eval_loss_final"] for tokens in (SHORT, MIDDLE, LONG)]
    right.plot([20, 40, 80], parallel, "k:", marker="o", label="data-parallel")
    right.set(xlabel="versions of each fragment (run length)", ylabel="final held-out loss, nats per byte")
    right.set_xscale("log", base=2)
    right.set_xticks([20, 40, 80], ["20", "40", "80"])
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Run what is missing of docs/quality.md, and rebuild it.")
    parser.add_argument("--page", action="store_true", help="only rebuild the tables and the plot")
    args = parser.parse_args()
    results = load()
    if not args.page:
        run_missing(all_specs(), results)
    PAGE.write_text(rebuilt(PAGE.read_text(), results))
    draw(results, PLOT)
    print(f"{PAGE.relative_to(ROOT)} and {PLOT.relative_to(ROOT)} show {len(results)} runs")


if __name__ == "__main__":
    main()
