"""Attacks with numbers that are lies: tokens, steps and seconds that were never trained."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import torch
from attack import Evidence, Over, Seen, Target
from intruder import Asked, Mole
from torch import Tensor

TAKEN = "ACCEPTED"


def claiming(tokens: int) -> Callable[[Target, Over], Seen]:
    """Contributions of so many tokens that say nothing."""

    def make(asked: Asked) -> Tensor:
        asked.header.tokens = tokens
        return torch.zeros(asked.fragment.num_elements)

    return lambda target, over: Mole(target).work(make, over)


def judge_refused(found: Evidence) -> list[str]:
    """No such contribution is taken, and the counters say so."""
    problems = []
    if taken := found.seen.took(TAKEN):
        problems.append(f"{taken} such contributions were accepted")
    if not found.seen.facts.get("asked"):
        problems.append("the attacker was never asked, so nothing was tried")
    merged = found.status.get("tokens_merged", 0)
    if merged > 2**40:
        problems.append(f"{merged:.3g} tokens are merged")
    return problems


GHOSTS = 5
GRACE_MAX_S = 2.0
EXTRA_STEPS = 1_000
SPARSE = 64
"""Inner steps between rounds: so few that rounds are not held up by the time that each takes."""


def slow_ghosts(target: Target, over: Over) -> Seen:
    """Five learners that report a million seconds per step, and contribute nothing."""
    moles = [Mole(target, f"ghost-{index}") for index in range(GHOSTS)]
    for mole in moles:
        mole.step_time_s, mole.report_every_s = 1e6, 0.2
    return _all(moles, over)


def judge_grace(found: Evidence) -> list[str]:
    grace_s = found.status.get("grace_s", 0.0)
    return [f"the grace window is {grace_s:.0f} s"] if grace_s > GRACE_MAX_S else []


def fast_steps(target: Target, over: Over) -> Seen:
    """A learner that reports a thousand steps more with every report, and contributes nothing but zeros."""
    mole = Mole(target)
    mole.steps_per_report, mole.report_every_s = EXTRA_STEPS, 0.02
    return mole.work(lambda asked: torch.zeros(asked.fragment.num_elements), over)


def judge_rounds(found: Evidence) -> list[str]:
    """A round of strangers takes the steps of more than half of them, so one alone opens none."""
    if found.before is None or found.after is None:
        return []
    rounds = found.status.get("rounds", 0) - found.status_before.get("rounds", 0)
    fragments = 4
    most = (found.after.steps - found.before.steps) * fragments / SPARSE + 2 * fragments
    return [f"{rounds} rounds, {most:.0f} at most"] if rounds > most else []


def _all(moles: list[Mole], over: Over) -> Seen:
    threads = [threading.Thread(target=mole.work, args=(None, over), daemon=True) for mole in moles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = sum((mole.answers for mole in moles), Counter[str]())
    return Seen(answers, {"asked": float(sum(mole.asked for mole in moles))})
