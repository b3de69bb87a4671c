"""Attacks on the values: norms that grow from round to round, and gradients with the sign turned round."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from attack import Evidence, Over, Seen, Target
from honest_learners import TOKENS, lesson, model_of
from intruder import Asked, Mole
from torch import Tensor

from diloco_worker.core.replica import Replica

STEP_UP = 12.0
LARGEST = 1000.0
"""Parameter, in magnitude. One contribution may be 1000 times as long as is usual (guard.norm_factor), and where it is
alone in its round it moves the model by as much: to 120, at most, in all that was tried. What must not be is that the
next one is longer again: without bounds on the usual norm this reaches 10^9 and more."""
FLIPS = (10.0, 500.0)
FAST_FLIP = 300.0
CLAIMED = 512
"""Steps per contribution."""
STEPS = 8
"""Between two rounds."""
TRIED = 8


def ratchet(target: Target, over: Over) -> Seen:
    """Every contribution is twelve times the last one that was taken, and rounds are driven by claimed steps."""
    mole = Mole(target)
    mole.steps_per_report, mole.report_every_s = 16, 0.02
    norms: dict[int, float] = {}

    def make(asked: Asked) -> Tensor:
        p, size = asked.fragment.fragment_id, asked.fragment.num_elements
        match mole.last.get(p):
            case "ACCEPTED":
                norms[p] *= STEP_UP
            case "NORM_TOO_LARGE" | "NOT_FINITE":
                norms[p] /= STEP_UP**0.5
        norms[p] = min(norms.get(p, 1e-2), 1e12)
        direction = torch.randn(size, generator=torch.Generator().manual_seed(p))
        return direction * (norms[p] / float(direction.norm()))

    seen = mole.work(make, over)
    found = [mole.pull(p) for p in norms]
    seen.facts["theta"] = max((float(one[1].abs().max()) for one in found if one is not None), default=0.0)
    seen.facts["norm"] = max(norms.values(), default=0.0)
    return seen


def judge_theta(found: Evidence) -> list[str]:
    largest = max(found.seen.facts.get("theta", 0.0), found.after.largest if found.after is not None else 0.0)
    return [f"a parameter of the model is {largest:.3g}"] if not largest <= LARGEST else []


# ------------------------------------------------------------------ sign flip


class Flipped:
    """Trains as the others do, from what it pulls, all the time; so it has an answer as soon as it is asked."""

    def __init__(self, mole: Mole) -> None:
        self._mole = mole
        self._trained: dict[int, Tensor] = {}
        self._model = model_of(0)
        self._replica = Replica(self._model)
        self._chance = torch.Generator().manual_seed(14)

    def __call__(self, asked: Asked) -> Tensor | None:
        """What an honest learner would send now; None before it knows."""
        return self._trained.get(asked.fragment.fragment_id)

    def train(self, over: Over) -> None:
        while not over():
            before = {}
            for p, fragment in self._mole.fragments.items():
                if (found := self._mole.pull(p)) is not None:
                    self._replica.write(fragment, found[1])
                    before[p] = found[1]
            optimizer = torch.optim.AdamW(self._model.parameters(), 3e-3)
            for _ in range(STEPS):
                optimizer.zero_grad()
                self._model.loss(lesson(self._chance)).backward()
                optimizer.step()
            for p, values in before.items():
                after = torch.empty_like(values)
                self._replica.read(self._mole.fragments[p], after)
                self._trained[p] = values - after
            time.sleep(0.05)


def fast_flip(target: Target, over: Over) -> Seen:
    """It reports steps a little too fast, claims many per contribution, and sends 300 times the negative."""
    mole = Mole(target)
    mole.steps_per_report = 3
    return _flipped(mole, over, (FAST_FLIP,), CLAIMED)


def sign_flip(target: Target, over: Over) -> Seen:
    """One of eight sends ten times, then five hundred times, the negative of what it trained."""
    return _flipped(Mole(target), over, FLIPS)


def _flipped(mole: Mole, over: Over, times: Sequence[float], claimed: int = 0) -> Seen:
    """`claimed`: steps; 0: as they are."""
    mole.tokens_per_report = 2 * TOKENS
    trained = Flipped(mole)
    threading.Thread(target=trained.train, args=(over,), name="train", daemon=True).start()
    sent = 0

    def make(asked: Asked) -> Tensor | None:
        nonlocal sent
        found = trained(asked)
        sent += 1
        asked.header.steps = claimed or asked.header.steps
        return None if found is None else found * -times[sent // 8 % len(times)]

    return mole.work(make, over)


def judge_tried(found: Evidence) -> list[str]:
    if sum(found.seen.answers.values()) - found.seen.took("OK", "LATE") < TRIED:
        return ["hardly any contribution of the attacker came in time, so nothing was tried"]
    return []
