"""One liar among eight: what it does to the model, for each merge rule. The table of docs/quality.md.

    python benchmarks/hostile.py                       # run what is missing, by the merge alone
    python benchmarks/hostile.py --quarantine          # the same with the quarantine on, as by default
    python benchmarks/hostile.py --unbounded           # the same by the published formulas
    python benchmarks/hostile.py --merge centered_clip --attacks "sign flip x10" "inner product"
    python benchmarks/hostile.py --page                # train nothing; put the table into docs/quality.md

Whole runs in lockstep (`diloco_lab.lockstep`): 8 learners, the built-in model and data, AdamW. The liar trains as
the others do, and then pushes something else. It knows all that a liar could wish for: for ALIE and inner-product
manipulation it waits until the others have contributed, and reads what they sent. benchmarks/results/hostile.jsonl
keeps the results, one run per line. The norm guard is on, as by default. A refused lie shows among the answers.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from diloco_common.codec import Payload, decode_payload, encode_payload
from diloco_common.messages import PushAnswer, PushHeader
from diloco_common.settings import GuardSettings, ModelSettings, RunSettings, Settings, SyncSettings, TrainSettings
from diloco_lab.arms import Conditions
from diloco_lab.lockstep import TICK, LearnerRig, LockstepRun, ShardRig
from diloco_lab.tasks import BuiltIn
from diloco_worker.builtin.data import load_corpus
from diloco_worker.builtin.evaluation import evaluate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "hostile.jsonl"
PAGE = ROOT / "docs" / "quality.md"
LIAR = "worker-7"
LEARNERS = 8
TOKENS = 1_966_080
"""Of eight learners: 960 inner steps each, 40 versions of each fragment."""
EVALUATION_TOKENS = 131_072
SEEDS = (0, 1)
PATIENCE = 1.5
"""Inner steps for which a liar waits for the contributions of the others."""
ALIE_Z = 1.5
"""Standard deviations. With one liar of eight the paper's own formula gives less than none; 1.5 is what it uses."""
TOKEN_LIE = 2**40

LAYERS, WIDTH, CONTEXT, BATCH = 2, 64, 64, 4
CODES = ("NORM_TOO_LARGE", "NOT_FINITE", "QUARANTINED")


@dataclass(frozen=True)
class Case:
    """One run."""

    merge: str = "rda"
    attack: str = ""
    """Of the eighth learner. "": it is honest."""
    learners: int = LEARNERS
    seed: int = 0
    quarantine: bool = False
    """As by default. Off: what the merge does by itself."""
    unbounded: bool = False
    """Among members: the formulas as published, and what is too long is refused. Else among strangers."""

    def settings(self) -> Settings:
        return Settings(
            run=RunSettings(tokens=TOKENS, seed=self.seed),
            sync=SyncSettings.model_validate({"merge": self.merge}),
            guard=GuardSettings(
                trust="members" if self.unbounded else "strangers", quarantine_s=60 if self.quarantine else 0
            ),
            model=ModelSettings(layers=LAYERS, heads=2, width=WIDTH, context=CONTEXT),
            train=TrainSettings(batch=BATCH, optimizer="adamw", lr=2e-3, schedule="cosine", lr_final=0.1),
        )


Results = dict[Case, dict[str, Any]]
Lie = Callable[[Tensor, Sequence[Tensor], dict[str, Tensor]], Tensor]
"""(what an honest learner would send, what the others sent, what this liar remembers) -> what it sends."""


def alie(own: Tensor, others: Sequence[Tensor], memory: dict[str, Tensor]) -> Tensor:
    """mean - z std of the others: inside their spread, always on the wrong side of it.

    Baruch, Baruch, Goldberg 2019, "A Little Is Enough" (arXiv 1902.06156).
    """
    stacked = torch.stack([*others])
    mu, sigma = stacked.mean(0), stacked.std(0)
    return mu - ALIE_Z * sigma * torch.sign(mu)


def inner_product(own: Tensor, others: Sequence[Tensor], memory: dict[str, Tensor]) -> Tensor:
    """The opposite of the others' mean, ten times as long.

    Xie, Koyejo, Gupta 2019, "Fall of Empires" (arXiv 1903.03936).
    """
    return -10.0 * torch.stack([*others]).mean(0)


def replay(own: Tensor, others: Sequence[Tensor], memory: dict[str, Tensor]) -> Tensor:
    """The first contribution, again and again."""
    return memory.setdefault("first", own.clone())


ATTACKS: dict[str, Lie] = {
    "sign flip x10": lambda own, others, memory: -10.0 * own,
    "sign flip x500": lambda own, others, memory: -500.0 * own,
    "token lie": lambda own, others, memory: -own,
    "ALIE": alie,
    "inner product": inner_product,
    "replay": replay,
}
NEEDS_OTHERS = ("ALIE", "inner product")


class Liar(LearnerRig):
    """Trains like the others, and pushes something else."""

    def __init__(self, run: HostileRun, index: int) -> None:
        super().__init__(run, index)
        self._attack = run.attack
        self._memories: dict[int, dict[str, Tensor]] = {}
        self.answers: Counter[str] = Counter()

    def _arrive(self, rig: ShardRig, header: PushHeader, payload: Payload, waited: float = 0.0) -> None:
        collecting = rig.shard.owned(header.fragment_id).round
        others = [c for i, c in collecting.contributions.items() if i != LIAR] if collecting is not None else []
        awaited = collecting is not None and any(i != LIAR for i in collecting.missing)
        if self._attack in NEEDS_OTHERS and awaited and waited < PATIENCE:
            self._run.clock.after(TICK, lambda: self._arrive(rig, header, payload, waited + TICK))
            return
        if self._attack not in NEEDS_OTHERS or len(others) > 1:
            memory = self._memories.setdefault(header.fragment_id, {})
            lie = ATTACKS[self._attack](_values(payload), [_values(c.payload) for c in others], memory)
            payload = encode_payload(lie, payload.header.encoding)
            tokens = TOKEN_LIE if self._attack == "token lie" else header.tokens
            header = replace(header, payload=payload.header, tokens=tokens)
        super()._arrive(rig, header, payload)

    def _hand_in(self, rig: ShardRig, header: PushHeader, payload: Payload) -> PushAnswer:
        answer = super()._hand_in(rig, header, payload)
        if not header.is_seed:
            self.answers[answer.code or answer.outcome.name] += 1
        return answer


class HostileRun(LockstepRun):
    """A run that ends after a time: with a token lie, a budget of tokens would end it at once."""

    def __init__(self, settings: Settings, attack: str, learners: int) -> None:
        """`attack` "": nobody lies."""
        self.corpus = load_corpus("stdlib", settings.data.held_out)
        endless = settings.model_copy(update={"run": RunSettings(seed=settings.run.seed)})
        super().__init__(endless, BuiltIn(endless, corpus=self.corpus), Conditions(learners=learners))
        self.attack = attack
        self.steps = TOKENS // (LEARNERS * settings.train.batch * settings.model.context)
        if attack:
            self.learners[LIAR] = Liar(self, int(LIAR.removeprefix("worker-")))
        for learner in self.learners.values():
            learner._settings = settings  # its learning rate follows the budget

    @property
    def fraction(self) -> float:
        return min(1.0, self.clock.now / self.steps)

    def train(self) -> None:
        """As many inner steps per learner in every run."""
        for learner in self.learners.values():
            learner.join(self.shards)
        for i, learner in enumerate(self.learners.values()):
            self.clock.after(1 + i / len(self.learners), learner.step)
        self.clock.after(TICK, self._tick)
        while self.clock.now < self.steps:
            self.clock.step()


def run(case: Case) -> dict[str, Any]:
    """Train, and evaluate the global model: nats per byte on held-out text."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    training = HostileRun(case.settings(), case.attack, case.learners)
    training.train()
    model = training.global_model()
    loss = evaluate(model, training.corpus.held_out, CONTEXT, max_tokens=EVALUATION_TOKENS)
    states = [state for rig in training.shards for state in rig.shard.fragments.values()]
    return {
        "loss": round(loss, 4), "versions": min(state.version for state in states),
        "liar": dict(training.learners[LIAR].answers) if case.attack else {},
        "honest refused": sum(sum(rig.shard.ledger.rejected.values()) for rig in training.shards)
        - sum(n for code, n in (training.learners[LIAR].answers if case.attack else {}).items() if code in CODES),
        "wall_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def _values(payload: Payload) -> Tensor:
    """float32 [num_elements]."""
    out = torch.empty(payload.header.num_elements)
    decode_payload(payload, out)
    return out


# ------------------------------------------------------------------ results


def load() -> Results:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {Case(**entry["case"]): entry["result"] for entry in map(json.loads, lines)}


def table(merge: str, results: Results) -> str:
    """Markdown; means over the seeds that a row and its column's clean run have."""
    lines = [
        "| the eighth learner | loss | to clean | with quarantine | published formulas | answers to the liar |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for label, case in cases(merge):
        answers: Counter[str] = Counter()
        for seed in SEEDS:
            answers.update(results.get(replace(case, seed=seed), {}).get("liar", {}))
        said = ", ".join(f"{code} {count}" for code, count in sorted(answers.items()))
        losses = _losses(results, case)
        loss = f"{fmean(losses):.3f}" if losses else ""
        ratios = [_ratio(results, replace(case, **{key: True})) for key in ("quarantine", "unbounded")]
        if any([loss, *ratios]):
            lines.append(f"| {label} | {loss} | {_ratio(results, case)} | {ratios[0]} | {ratios[1]} | {said} |")
    return "\n".join(lines)


def _ratio(results: Results, case: Case) -> str:
    """Loss over that of eight honest learners under the default rule, same seeds; "" if nobody ran it."""
    clean = Case(case.merge)
    pairs = [(results.get(replace(case, seed=s)), results.get(replace(clean, seed=s))) for s in SEEDS]
    ratios = [one["loss"] / honest["loss"] for one, honest in pairs if one and honest]
    return f"{fmean(ratios):.3f}" if ratios else ""


def _losses(results: Results, case: Case) -> list[float]:
    return [results[one]["loss"] for one in (replace(case, seed=s) for s in SEEDS) if one in results]


def cases(merge: str) -> list[tuple[str, Case]]:
    """The rows of a table."""
    rows = [("honest", Case(merge)), ("absent", Case(merge, learners=LEARNERS - 1))]
    return rows + [(attack, Case(merge, attack)) for attack in ATTACKS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--merge", nargs="+", default=["rda"], help="sync.merge")
    parser.add_argument("--attacks", nargs="*", choices=["", *ATTACKS], help="only these; '' is nobody")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--quarantine", action="store_true", help="on, as by default")
    parser.add_argument("--unbounded", action="store_true", help="the formulas as published")
    parser.add_argument("--page", action="store_true", help="train nothing; put the tables into docs/quality.md")
    args = parser.parse_args()
    results = load()
    for merge in args.merge:
        for seed in args.seeds:
            for _, case in cases(merge):
                one = replace(case, seed=seed, quarantine=args.quarantine, unbounded=args.unbounded)
                if args.page or one in results or (args.attacks is not None and one.attack not in args.attacks):
                    continue
                results[one] = result = run(one)
                with RESULTS.open("a") as out:
                    out.write(json.dumps({"case": asdict(one), "result": result}) + "\n")
                print(json.dumps(result), one, flush=True)
        print(table(merge, results))
    if args.page:
        shown = "\n\n".join(table(merge, results) for merge in args.merge)
        PAGE.write_text(
            re.sub(r"(?s)(<!-- hostile -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{shown}\g<2>", PAGE.read_text())
        )


if __name__ == "__main__":
    main()
