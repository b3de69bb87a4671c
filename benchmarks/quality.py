"""Which settings learn best, and what decoupling costs: the runs behind docs/quality.md.

    python benchmarks/quality.py                 # run what is missing, rebuild the tables and the plot
    python benchmarks/quality.py --list          # say what would run
    python benchmarks/quality.py --page          # only rebuild

benchmarks/results/quality.jsonl keeps the results, one run per line with all of its settings. No run is repeated. A run
is deterministic and takes one core for 10 to 170 s. The lab drives the production cores (`diloco_lab.lockstep`) and
holds the references. The model is small on purpose, so dozens of runs fit in an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

from diloco_common.allocator import tune_allocator
from diloco_lab import protocol_page, runner
from diloco_lab.arms import Conditions, load_arm
from diloco_lab.lockstep import LockstepRun, Outcome
from diloco_lab.protocol import carried_out, load_protocol
from diloco_lab.references import classic_diloco, data_parallel
from diloco_lab.report import gap
from diloco_lab.tasks import BuiltIn
from diloco_worker.builtin.data import load_corpus
from diloco_worker.builtin.evaluation import evaluate
from quality_page import PAGE, PLOT, all_specs, draw, rebuild
from quality_spec import Spec, describe

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quality.jsonl"
PROTOCOL = ROOT / "benchmarks" / "quality_protocol.toml"
PROTOCOL_RESULTS = ROOT / "benchmarks" / "results" / "quality_protocol.jsonl"
EVALUATION_TOKENS = 131_072
CURVE_TOKENS = 16_384
CURVE_POINTS = 12
SEEDS_MAX = 100
"""More than anybody ran."""


@dataclass(frozen=True)
class Shown:
    """A folder of arms that docs/quality.md shows, under the mark of its name."""

    folder: str
    results: str
    """benchmarks/results/quality_RESULTS.jsonl"""
    base: str = ""
    """What all are held against,"""
    pairs: Sequence[tuple[str, str]] = ()
    """or which against which."""


REFERENCES = [("ours", "data_parallel_muon"), ("ours", "data_parallel_adamw")]
FOLDERS = [
    Shown("disturbed", "disturbed", base="undisturbed"),
    Shown("momentum", "protocol", base="as_it_is"),
    Shown("asynchronous", "async", base="carry_and_grace"),
    Shown("longer", "longer", pairs=REFERENCES),
]


def run(spec: Spec) -> dict[str, object]:
    """Train, and evaluate the global model: nats per byte on held-out text."""
    torch.set_num_threads(1)
    tune_allocator()
    settings = spec.settings()
    corpus = load_corpus("stdlib", settings.data.held_out)
    task = BuiltIn(settings, corpus=corpus)
    curve: list[tuple[float, float]] = []

    def watch(progress: float, model: Callable[[], nn.Module]) -> None:
        if progress >= (len(curve) + 1) / CURVE_POINTS - 1e-9 and progress < 1:
            loss = evaluate(model(), corpus.held_out, spec.context, max_tokens=CURVE_TOKENS)
            curve.append((round(progress, 4), round(loss, 4)))

    began = time.perf_counter()
    first = evaluate(task.model(), corpus.held_out, spec.context, max_tokens=EVALUATION_TOKENS)
    if spec.method == "decoupled":
        shards = min(2, spec.fragments)
        conditions = Conditions(learners=spec.learners, shards=shards, speeds=spec.speeds, noise=spec.noise)
        lockstep = LockstepRun(settings, task, conditions)
        outcome = lockstep.run(lambda progress: watch(progress, lockstep.global_model))
        model = lockstep.global_model()
    else:
        reference = {"classic": classic_diloco, "data-parallel": data_parallel}[spec.method]
        model = reference(settings, task, spec.learners, lambda progress, model: watch(progress, lambda: model))
        outcome = Outcome(tokens_trained=spec.tokens)
    final = evaluate(model, corpus.held_out, spec.context, max_tokens=EVALUATION_TOKENS)
    return {
        "eval_loss_first": round(first, 4), "eval_loss_final": round(final, 4), "curve": curve,
        "wall_s": round(time.perf_counter() - began, 1), **asdict(outcome),
    }  # fmt: skip


def load() -> dict[Spec, dict[str, object]]:
    results = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        entry = json.loads(line)
        entry["spec"]["speeds"] = tuple(entry["spec"]["speeds"])
        results[Spec(**entry["spec"])] = entry["result"]
    return results


def run_missing(specs: Sequence[Spec], results: dict[Spec, dict[str, object]]) -> None:
    missing = [spec for spec in dict.fromkeys(specs) if spec not in results]
    for i, spec in enumerate(missing, 1):
        results[spec] = result = run(spec)
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as out:
            out.write(json.dumps({"spec": asdict(spec), "result": result}) + "\n")
        print(f"[{i}/{len(missing)}] {result['eval_loss_final']} {result['wall_s']} s {describe(spec)}", flush=True)


def rebuilt(page: str, results: dict[Spec, dict[str, object]]) -> str:
    """The page with all of its tables."""
    return reduce(show_arms, FOLDERS, show_protocol(rebuild(page, results)))


def show_protocol(page: str) -> str:
    """The page with what the protocol has found so far."""
    protocol, lines = load_protocol(PROTOCOL), runner.load(PROTOCOL_RESULTS)
    cells, report = carried_out(protocol, lines)
    text = protocol_page.page(cells, report) if report else "No seed is reported yet."
    shown = f"{text.strip()}\n\nAll trials:\n\n{protocol_page.trials(protocol, lines)}"
    return re.sub(
        r"(<!-- protocol -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{shown}\n\n{m[2]}", page, flags=re.DOTALL
    )


def show_arms(page: str, shown: Shown) -> str:
    """The page with what the arms of a folder have come to so far, in pairs of one seed."""
    lines = runner.load(RESULTS.parent / f"quality_{shown.results}.jsonl")
    arms = {path.stem: load_arm(path) for path in sorted((ROOT / "benchmarks" / shown.folder).glob("*.toml"))}
    head = ["| run | loss | held against | its loss | above it, 95 % | contributions a round |"]
    head.append("| --- | ---: | --- | ---: | ---: | ---: |")
    rows: list[str] = []
    for name, base in shown.pairs or [(name, shown.base) for name in arms if name != shown.base]:
        arm, other = arms[name], arms[base]
        seeds = [seed for seed in range(SEEDS_MAX) if {arm.key(seed), other.key(seed)} <= lines.keys()]
        if (found := gap(arm, other, seeds, lines)) is None:
            continue
        loss, its_loss = (fmean(lines[of.key(seed)]["result"]["loss"] for seed in seeds) for of in (arm, other))
        merged = [lines[arm.key(seed)]["result"].get("participants", math.nan) for seed in seeds]
        a_round = "" if math.isnan(merged[0]) else f"{fmean(merged):.2f}"
        rows.append(f"| {_words(name)} | {loss:.4f} | {_words(base)} | {its_loss:.4f} | {found} | {a_round} |")
    mark = rf"(<!-- {shown.folder} -->\n).*?(<!-- end -->)"
    text = [*head, *rows] if rows else ["Not run yet."]
    return re.sub(mark, lambda m: "\n".join([m[1], *text, "", m[2]]), page, flags=re.DOTALL)


def _words(name: str) -> str:
    return name.replace("_", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run what is missing of docs/quality.md, and rebuild it.")
    parser.add_argument("--list", action="store_true", help="say what would run")
    parser.add_argument("--page", action="store_true", help="only rebuild the tables and the plot")
    args = parser.parse_args()
    results = load()
    missing = [spec for spec in all_specs() if spec not in results]
    if args.list:
        print(*map(describe, missing), f"{len(missing)} runs are missing, {len(results)} are there", sep="\n")
        return
    if not args.page:
        run_missing(missing, results)
    PAGE.write_text(rebuilt(PAGE.read_text(), results))
    draw(results, PLOT)
    print(f"{PAGE.relative_to(ROOT)} and {PLOT.relative_to(ROOT)} show {len(results)} runs")


if __name__ == "__main__":
    main()
