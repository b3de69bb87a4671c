"""The tables and the plot of docs/quality.md, and the runs that they need.

Each table is between `<!-- table: NAME -->` and `<!-- end -->` in the page. The text around it is written by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from diloco_common.codec import CHUNK_ELEMENTS_MAX, num_payload_bytes
from quality_spec import Spec

Results = Mapping[Spec, Mapping[str, Any]]

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "quality.md"
PLOT = DOCS / "quality.png"

SHORT, MIDDLE, LONG = 491_520, 983_040, 1_966_080
"""Token budgets: with 4 learners and H = 24, 20, 40 and 80 versions of each fragment."""
FAIR = 894_720
"""A run that drops the work of tau steps per round, and merges this many tokens, trains on MIDDLE tokens."""
STRAGGLER = (1.09, 1.0, 0.91, 0.2)
SPREAD = (1.09, 1.03, 0.97, 0.91)
FIGURES: Mapping[str, Callable[[float], str]] = {
    "participants": "{:.1f}".format,
    "versions": "{:.0f}".format,
    "duration": "{:.0f}".format,
    "tokens_trained": lambda tokens: f"{tokens / 1e6:.3f}",
}
"""Fields of a result in the tables, with their formats."""


@dataclass(frozen=True)
class Row:
    label: str
    """May hold several cells, separated by |."""
    specs: Sequence[Spec]
    """One per column of losses."""


@dataclass(frozen=True)
class Table:
    """Losses in nats per byte, mean over `seeds`; optionally how far each is above another, and other figures."""

    head: str
    rows: Sequence[Row]
    seeds: Sequence[int] = (0,)
    above: Literal["", "first row", "first column"] = ""
    figures: Sequence[str] = ()
    """Further fields of the first spec's result to show."""

    def specs(self) -> list[Spec]:
        return [replace(s, seed=seed) for row in self.rows for s in row.specs for seed in self.seeds]

    def render(self, results: Results) -> str:
        lines = [f"| {self.head} |", "| --- |" + " ---: |" * self.head.count("|")]
        for row in self.rows:
            cells = [row.label]
            for i, spec in enumerate(row.specs):
                loss = self._mean(spec, "eval_loss_final", results)
                cells.append(f"{loss:.3f}")
                other = self.rows[0].specs[i] if self.above == "first row" else row.specs[0]
                if (self.above == "first row" and row is not self.rows[0]) or (self.above == "first column" and i):
                    cells.append(f"{100 * (loss / self._mean(other, 'eval_loss_final', results) - 1):+.1f} %")
                elif self.above == "first row":
                    cells.append("")
            for name in self.figures:
                value = self._mean(row.specs[0], name, results)
                cells.append(FIGURES[name](value))
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _mean(self, spec: Spec, name: str, results: Results) -> float:
        return fmean(results[replace(spec, seed=seed)][name] for seed in self.seeds)


@dataclass(frozen=True)
class Paired:
    """Two settings with the same seeds. The gap is taken per seed, so what a seed does to both falls out."""

    head: str
    rows: Sequence[tuple[str, Spec, Spec, int]]
    """Label, both settings, and how many seeds, counted from 0."""

    def specs(self) -> list[Spec]:
        return [replace(s, seed=seed) for _, *both, n in self.rows for seed in range(n) for s in both]

    def render(self, results: Results) -> str:
        lines = [f"| {self.head} |", "| --- |" + " ---: |" * self.head.count("|")]
        for label, first, second, n in self.rows:
            a, b = ([results[replace(s, seed=i)]["eval_loss_final"] for i in range(n)] for s in (first, second))
            gaps = [100 * (y / x - 1) for x, y in zip(a, b, strict=True)]
            half = T_95[n] * stdev(gaps) / math.sqrt(n)
            gap = f"{fmean(gaps):+.2f} % ± {half:.2f}"
            lines.append(f"| {label} | {n} | {fmean(a):.3f} | {fmean(b):.3f} | {gap} |")
        return "\n".join(lines)


@dataclass(frozen=True)
class Optimizers:
    """A row of `Seeds`."""

    label: str
    spec: Spec
    seeds: int
    """Counted from 0."""


@dataclass(frozen=True)
class Seeds:
    """Losses seed by seed."""

    head: str
    rows: Sequence[Optimizers]

    def specs(self) -> list[Spec]:
        return [replace(row.spec, seed=seed) for row in self.rows for seed in range(row.seeds)]

    def render(self, results: Results) -> str:
        most = max(row.seeds for row in self.rows)
        lines = [f"| {self.head} |", "| --- |" + " ---: |" * self.head.count("|")]
        for row in self.rows:
            losses = [f"{results[replace(row.spec, seed=seed)]['eval_loss_final']:.3f}" for seed in range(row.seeds)]
            lines.append(f"| {' | '.join([row.label, *losses, *[''] * (most - row.seeds)])} |")
        return "\n".join(lines)


T_95 = {3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262}
"""Of Student's distribution: half a 95 % interval of so many pairs, in standard errors."""


def all_specs() -> list[Spec]:
    """Every run that the page shows, once."""
    return list(dict.fromkeys(spec for table in TABLES.values() for spec in table.specs()))


def rebuild(page: str, results: Results) -> str:
    """The page with new tables. Raises KeyError if a run is missing or the name of a table is unknown."""
    return re.sub(
        r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}\n{TABLES[m[2]].render(results)}\n\n{m[3]}",
        page,
        flags=re.DOTALL,
    )


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


# ------------------------------------------------------------ the runs

STUDY = Spec()
"""Base of the one-factor comparisons: 20 versions, with the best momentum for that length, 0."""
CHOSEN = replace(STUDY, momentum=0.5, tokens=MIDDLE)
"""The defaults of the product, at 40 versions."""
CLASSIC = Spec(method="classic", momentum=0.9, tokens=MIDDLE)
PARALLEL = Spec(method="data-parallel", tokens=MIDDLE)
DEMO = Spec(learners=3, tokens=1_000_000, layers=4, width=128, context=128, batch=8)


def _study(label: str, **changes: Any) -> Row:
    return Row(label, [replace(STUDY, **changes)])


def _bytes(push: str, pull: str) -> Row:
    """A row for two encodings, with their bytes per parameter of a large fragment, up plus down."""
    size = sum(num_payload_bytes(encoding, CHUNK_ELEMENTS_MAX) for encoding in (push, pull)) / CHUNK_ELEMENTS_MAX
    return Row(f"{push} | {pull} | {size:.2f}", [replace(CHOSEN, push=push, pull=pull)])


def _lengths(label: str, spec: Spec, *more: Spec) -> Row:
    return Row(label, [*(replace(spec, tokens=tokens) for tokens in (SHORT, MIDDLE, LONG)), *more])


def _muon(label: str, second: bool = False, **changes: Any) -> Optimizers:
    base = replace(CHOSEN, optimizer="muon", merge="mean", schedule="linear", lr_final=0.0)
    return Optimizers(label, replace(base, **changes), 2 if second else 1)


TABLES: Mapping[str, Table | Paired | Seeds] = {
    "muon": Seeds(
        "optimizer | rate of matrices | rate of embedding and head | schedule | merge | seed 0 | seed 1",
        [
            _muon("AdamW | 2e-3 | 2e-3 | linear to zero | RDA", True, optimizer="adamw", merge="rda"),
            _muon("Muon | 3e-3 | 2e-3 | linear to zero | mean", muon_lr=3e-3),
            _muon("Muon | 5e-3 | 2e-3 | linear to zero | mean", True),
            _muon("Muon | 8e-3 | 2e-3 | linear to zero | mean", muon_lr=8e-3),
            _muon("Muon | 5e-3 | 2e-3 | linear to zero | RDA", merge="rda"),
            _muon("Muon | 5e-3 | 2e-3 | cosine to a tenth | mean", schedule="cosine", lr_final=0.1),
            _muon("Muon (the default) | 5e-3 | 4e-3 | linear to zero | mean", inner_lr=4e-3),
            _muon("Muon | 5e-3 | 8e-3 | linear to zero | mean", inner_lr=8e-3),
        ],
    ),
    "classic": Table(
        "outer rate | momentum | float32 classic DiLoCo | ours | above",
        [
            Row(f"0.7 | {momentum:g}", [replace(s, momentum=momentum) for s in (CLASSIC, CHOSEN)])
            for momentum in (0.0, 0.5, 0.9)
        ],
        seeds=(0, 1),
        above="first column",
    ),
    "merge": Table(
        "inner rate | outer rate | momentum | mean | RDA | above",
        [
            Row(f"{inner:g} | {lr:g} | {momentum:g}", [
                replace(STUDY, inner_lr=inner, outer_lr=lr, momentum=momentum, merge=merge) for merge in ("mean", "rda")
            ])
            for inner, lr, momentum in [
                (2e-3, 0.7, 0.0), (2e-3, 1.0, 0.0), (2e-3, 1.0, 0.5), (2e-3, 0.7, 0.9),
                (4e-3, 0.7, 0.0), (4e-3, 1.0, 0.0), (4e-3, 0.7, 0.5), (4e-3, 0.4, 0.9), (4e-3, 0.7, 0.9),
            ]
        ],
        above="first column",
    ),
    "outer": Table(
        "outer rate | momentum | loss",
        [
            Row(f"{lr:g} | {momentum:g}", [replace(STUDY, outer_lr=lr, momentum=momentum)])
            for lr, momentum in [
                (0.4, 0.0), (0.7, 0.0), (1.0, 0.0), (0.5, 0.3), (0.4, 0.5), (0.7, 0.5), (1.0, 0.5),
                (0.1, 0.9), (0.4, 0.9), (0.7, 0.9),
            ]
        ],
    ),
    "length": Table(
        "momentum | 20 versions | 40 versions | 80 versions | demo model, 14 versions",
        [
            _lengths(f"{momentum:g}", replace(STUDY, momentum=momentum), replace(DEMO, momentum=momentum))
            for momentum in (0.0, 0.5, 0.9)
        ],
    ),
    "rest": Table(
        "changed | loss | above the first | million tokens trained",
        [
            _study("nothing: RDA, carry, H = 24, P = 24, int8 with error feedback"),
            _study("merge by mean", merge="mean"),
            _study("overwrite", on_commit="overwrite"),
            _study("blend, alpha 0.5", on_commit="blend"),
            _study("H = 8 (60 versions, three times the bytes)", sync_every=8),
            _study("H = 48 (10 versions, half the bytes)", sync_every=48),
            _study("P = 1", fragments=1),
            _study("P = 8", fragments=8),
            _study("push float32", push="float32"),
            _study("push int8 without error feedback", error_feedback=False),
            _study("push int4", push="int4"),
            _study("push int4 without error feedback", push="int4", error_feedback=False),
            _study("push e3m0", push="e3m0"),
            _study("push e3m0 without error feedback", push="e3m0", error_feedback=False),
        ],
        above="first row",
        figures=("tokens_trained",),
    ),
    "confirm": Table(
        "changed | loss | above the first | million tokens trained",
        [
            Row("nothing: RDA, carry, momentum 0.5", [CHOSEN]),
            Row("merge by mean", [replace(CHOSEN, merge="mean")]),
            Row("overwrite, as many tokens merged", [replace(CHOSEN, on_commit="overwrite")]),
            Row("overwrite, as many tokens trained", [replace(CHOSEN, on_commit="overwrite", tokens=FAIR)]),
            Row("blend, as many tokens merged", [replace(CHOSEN, on_commit="blend")]),
            Row("blend, as many tokens trained", [replace(CHOSEN, on_commit="blend", tokens=FAIR)]),
        ],
        above="first row",
        figures=("tokens_trained",),
    ),
    "bytes": Table(
        "push | pull | bytes per parameter | loss | above the first",
        [
            _bytes("float32", "float32"),
            _bytes("int8", "bfloat16"),
            _bytes("int4", "bfloat16"),
            _bytes("int8", "int8"),
            _bytes("int8", "int4"),
            _bytes("int4", "int8"),
            _bytes("topk64_2bit", "bfloat16"),
            _bytes("topk64_2bit", "int4"),
        ],
        seeds=(0, 1, 2),
        above="first row",
    ),
    "pull": Paired(
        "versions | seeds | bfloat16 down | int8 down | gap, 95 % interval",
        [
            ("40", CHOSEN, replace(CHOSEN, pull="int8"), 10),
            ("80", replace(CHOSEN, tokens=LONG), replace(CHOSEN, tokens=LONG, pull="int8"), 5),
        ],
    ),
    "topk": Table(
        "versions | outer rate | momentum | int8 up, bfloat16 down | topk64_2bit up, int4 down | above",
        [
            Row(f"{versions} | {lr:g} | {momentum:g}", [
                replace(CHOSEN, tokens=tokens, outer_lr=lr, momentum=momentum, push=push, pull=pull)
                for push, pull in (("int8", "bfloat16"), ("topk64_2bit", "int4"))
            ])
            for versions, tokens, lr, momentum in [
                (40, MIDDLE, 0.7, 0.0), (40, MIDDLE, 0.7, 0.5), (40, MIDDLE, 1.0, 0.5), (40, MIDDLE, 0.7, 0.9),
                (80, LONG, 0.7, 0.5), (80, LONG, 0.7, 0.9),
            ]
        ],
        above="first column",
    ),
    "speeds": Table(
        "learners | quorum | loss | contributions a round | versions | duration, inner steps | million tokens trained",
        [
            _study("18 % spread | K = 1, adaptive grace", speeds=SPREAD, noise=0.1),
            _study("18 % spread | K = 1, no grace", speeds=SPREAD, noise=0.1, grace=0),
            _study(
                "18 % spread | K = 1, no grace, overwrite", speeds=SPREAD, noise=0.1, grace=0, on_commit="overwrite"
            ),
            _study("18 % spread | K = all", speeds=SPREAD, noise=0.1, quorum="all"),
            _study("one 5x slower | K = 1, adaptive grace", speeds=STRAGGLER, noise=0.1),
            _study("one 5x slower | K = 1, no grace", speeds=STRAGGLER, noise=0.1, grace=0),
            _study("one 5x slower | K = all", speeds=STRAGGLER, noise=0.1, quorum="all"),
        ],
        figures=("participants", "versions", "duration", "tokens_trained"),
    ),
    "gap": Table(
        "learners | versions | data-parallel | ours | gap",
        [
            Row(f"{m} | {160 // m}", [replace(PARALLEL, learners=m), replace(CHOSEN, learners=m)])
            for m in (2, 4, 8)
        ],
        seeds=(0, 1),
        above="first column",
    ),
    "gap-lengths": Table(
        "versions, with 4 learners | data-parallel | ours | gap",
        [
            Row(f"{versions}", [replace(PARALLEL, tokens=tokens), replace(CHOSEN, tokens=tokens)])
            for versions, tokens in ((20, SHORT), (40, MIDDLE), (80, LONG))
        ],
        above="first column",
    ),
    "single": Table(
        "one process, one batch per step | loss", [Row("all tokens", [replace(PARALLEL, learners=1)])], seeds=(0, 1)
    ),
    "inner": Table(
        "inner rate | ours, 20 versions, outer rate 1.0, momentum 0",
        [Row(f"{lr:g}", [replace(STUDY, outer_lr=1.0, inner_lr=lr)]) for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    ),
    "inner-parallel": Table(
        "data-parallel | inner rate | loss",
        [
            Row(f"{m} learners | {lr:g}", [replace(PARALLEL, learners=m, inner_lr=lr)])
            for m, lr in ((4, 1e-3), (4, 2e-3), (4, 4e-3), (8, 2e-3), (8, 4e-3))
        ],
    ),
}  # fmt: skip

CURVES = {
    "data-parallel": PARALLEL,
    "ours (momentum 0.5)": CHOSEN,
    "ours, momentum 0.9": replace(CHOSEN, momentum=0.9),
    "classic DiLoCo, float32, 0.9": CLASSIC,
}
