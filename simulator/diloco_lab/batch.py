"""Many runs of the built-in model at once, on a GPU if there is one: what `runner.run` does one by one.

Runs are one batch if the cores decide the same for all of them (`recording.py`), and models, encodings and the kind of
optimizer are alike: they differ in seeds, rates, outer step and merge rule.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from diloco_common.extensions import is_extension
from diloco_common.settings import Settings
from diloco_demo.data import Corpus, TokenStream
from diloco_demo.gpt import build_gpt
from diloco_demo.training import share_at
from diloco_lab.arms import Arm, Conditions
from diloco_lab.recording import record
from diloco_lab.replay import CODE_MAX, Replay
from diloco_lab.stacked import Stack
from diloco_lab.streams import Streams
from diloco_lab.tasks import CURVE_TOKENS, EVALUATION_TOKENS, BuiltIn, corpus_of, half_of, part_of
from diloco_lab.trace import Steps, Trace

OF_A_RUN = {
    "run": ("seed",),
    "sync": ("merge",),
    "outer": ("lr", "momentum"),
    "train": (
        "lr", "muon_lr", "muon_momentum", "beta1", "beta2", "weight_decay", "clip", "schedule", "warmup", "lr_final",
        "decay",
    ),
}  # fmt: skip
"""Settings in which the runs of a batch may differ."""
ROWS_OF_CPU, ROWS_OF_GPU = 256, 2048
"""Models that are trained at once: more gain nothing."""

Pair = tuple[Arm, int]
"""An arm and a seed."""
Watch = Callable[[float, Tensor], None]
"""Called with the progress and the global models, float32 [S, P]."""


def is_plain(arm: Arm) -> bool:
    """Whether all of it is built in, so that a batch does the same."""
    s, method = arm.seeded(0), arm.conditions.method
    return (
        not arm.model
        and method != "classic"
        and not is_extension(s.train.optimizer)
        and (s.sync.on_commit, s.outer.optimizer) == ("carry", "nesterov")
        and not is_extension(s.sync.merge)
        and (s.sync.push in CODE_MAX or s.sync.push in ("float32", "bfloat16"))
        and s.guard.trust == "members"
    )


def batches(pairs: Sequence[Pair], device: torch.device, parts: int) -> list[list[Pair]]:
    """Those that can be run together. A group is cut into so many parts, and further where it is large."""
    groups: dict[str, list[Pair]] = {}
    for arm, seed in pairs:
        alike = _alike(arm, seed) if is_plain(arm) else {"alone": arm.key(seed)}
        groups.setdefault(json.dumps(alike, sort_keys=True), []).append((arm, seed))
    most = ROWS_OF_CPU if device.type == "cpu" else ROWS_OF_GPU
    found = []
    for group in groups.values():
        size = min(max(1, most // group[0][0].conditions.learners), -(-len(group) // parts))
        found += [group[i : i + size] for i in range(0, len(group), size)]
    return found


def run_batch(pairs: Sequence[Pair], device: torch.device, points: int) -> Iterator[dict[str, Any]] | None:
    """The results, in order, as of `runner.run`: losses, the curve of so many points, and what the cores did. None: in
    the trace something was refused, so each run must go its own way."""
    arm, _ = pairs[0]
    settings, conditions = [of.seeded(seed) for of, seed in pairs], arm.conditions
    began, learners = time.perf_counter(), range(conditions.learners)
    run: Callable[[Watch], Tensor]
    outcome: Mapping[str, object] = {}
    if conditions.method == "decoupled":
        trace = _trace(json.dumps(_alike(arm, pairs[0][1]), sort_keys=True))
        if not trace.is_healthy:
            return None
        outcome, steps = trace.outcome, max(_steps(trace).values())
        stack, streams = _prepared(arm, [(s, [learner]) for learner in learners for s in settings], steps, 1, device)
        run = Replay(trace, settings, stack, streams, len(learners)).run
    else:
        of, times = (range(1), conditions.batches) if conditions.method == "one-process" else (learners, 1)
        per_step = len(of) * times * settings[0].train.batch * settings[0].model.context
        steps = -(-settings[0].run.tokens // per_step)
        stack, streams = _prepared(arm, [(s, of) for s in settings], steps, times, device)
        run = partial(_synchronous, stack, streams, settings, steps)
    score, curves = partial(_scores, stack, corpus_of(settings[0])), [list[list[float]]() for _ in pairs]
    first = score(stack.theta[: len(pairs)].clone(), 1, EVALUATION_TOKENS)

    def watch(fraction: float, theta: Tensor) -> None:
        if fraction < 1 and fraction * points >= len(curves[0]) + 1:
            for curve, loss in zip(curves, score(theta, 1, CURVE_TOKENS), strict=True):
                curve.append([round(fraction, 4), round(loss, 5)])

    theta = run(watch)
    select, report = (score(theta, half, EVALUATION_TOKENS) for half in (0, 1))
    wall_s = round((time.perf_counter() - began) / len(pairs), 1)
    told = {"wall_s": wall_s, "stepped_by": stack.stepped_by, **outcome}
    return iter(
        {"loss_first": round(f, 5), "loss_select": round(s, 5), "loss": round(r, 5), "curve": curve} | told
        for f, s, r, curve in zip(first, select, report, curves, strict=True)
    )


# ------------------------------------------------------------ helpers


def _alike(arm: Arm, seed: int) -> dict[str, Any]:
    """What all runs of a batch have in common. Noise and drops are drawn by the seed."""
    facts = arm.facts(seed)
    for section, names in OF_A_RUN.items():
        facts["settings"][section] = {k: v for k, v in facts["settings"][section].items() if k not in names}
    drawn = bool(arm.conditions.noise or arm.conditions.drop)
    return {**facts, "seed": seed if drawn else None}


@lru_cache(maxsize=1)
def _trace(alike: str) -> Trace:
    """Of all runs that have this in common: batches of one group follow each other."""
    facts = json.loads(alike)
    settings, conditions = Settings.model_validate(facts["settings"]), Conditions.model_validate(facts["lab"])
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"seed": facts["seed"] or 0})})
    return record(settings, BuiltIn(settings, conditions.non_iid), conditions)


def _steps(trace: Trace) -> Mapping[int, int]:
    """Inner steps of each learner."""
    return Counter(learner for event in trace.events if isinstance(event, Steps) for learner in event.learners)


def _prepared(
    arm: Arm, rows: Sequence[tuple[Settings, Sequence[int]]], steps: int, batches: int, device: torch.device
) -> tuple[Stack, Streams]:  # fmt: skip
    """A row is a run's settings, and the learners whose batches it trains on: so many of each in a step."""
    one, conditions = rows[0][0], arm.conditions
    corpus = corpus_of(one)
    learners = 1 if conditions.method == "one-process" else conditions.learners

    @cache
    def starts(seed: int, learner: int) -> Tensor:
        part = part_of(corpus.train, learner, learners, conditions.non_iid)
        stream = TokenStream(
            part, learner_id=f"worker-{learner}", seed=seed, context=one.model.context, batch=one.train.batch
        )
        begins = stream.starts(steps * batches * one.train.batch) + int(part.storage_offset())
        return begins.int().view(steps, -1)

    @cache
    def first(seed: int) -> Tensor:
        return torch.cat([p.detach().flatten() for p in build_gpt(one.model, seed).parameters()])

    begins = torch.stack([torch.cat([starts(s.run.seed, learner) for learner in of], 1) for s, of in rows])
    theta = torch.stack([first(s.run.seed) for s, _ in rows]).to(device)
    stack = Stack(build_gpt(one.model, 0), [s.train for s, _ in rows], theta)
    return stack, Streams(corpus.train.to(device), begins.to(device), one.model.context)


def _synchronous(
    stack: Stack, streams: Streams, settings: Sequence[Settings], steps: int, watch: Watch
) -> Tensor:  # fmt: skip
    """As `references.data_parallel`: each row is one model that steps on the batches of all its learners."""
    for step in range(steps):
        shares = [share_at(fraction=step / steps, inner_step=step, budget=1, train=s.train) for s in settings]
        stack.step(None, *streams.next(None), torch.tensor(shares, dtype=torch.float32, device=stack.theta.device))
        watch((step + 1) / steps, stack.theta)
    return stack.theta


def _scores(stack: Stack, corpus: Corpus, theta: Tensor, half: int, tokens: int) -> list[float]:
    """The loss of each model on so many tokens of a half of what is held out."""
    found: list[float] = stack.evaluate(theta, half_of(corpus, half).to(theta.device), tokens).tolist()
    return found
