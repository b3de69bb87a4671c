"""The attacks, by number: each was done to this product once, and succeeded.

Those on the values of a contribution need no wire: benchmarks/hostile.py has what liars do to a whole run.
"""

from __future__ import annotations

import floods
import impostors
import lies
from attack import Attack, Needs

from builders import TinyText
from diloco_worker import digest_of

FREE, TOKEN, CERTIFICATE = Needs
BUDGET = {"run.tokens": 10**9}
CALM = {"lease.lease_s": 20}
"""The victim loses its lease to nobody, and not to a busy machine either."""
TWO = 2
"""Honest learners beside an attacker, where the median of three is to hold."""

_ROWS = [
    Attack(
        1, "half Joins", TOKEN, "60 connections, each a Join of 19 MB without its last byte; 60 more with the token",
        "bytes in flight are bounded", floods.half_joins, seconds=3.0,
    ),
    Attack(
        6, "tokens 2^64-1", TOKEN, "2^64 - 1 tokens each, in a run with a budget, then a restart and another learner",
        "refused; later learners join", lies.claiming(2**64 - 1), lies.judge_refused, late=True, restart=True,
        settings=BUDGET,
    ),
    Attack(
        8, "another's id", CERTIFICATE, "Join under the id of a worker that trains",
        "refused; the worker goes on", impostors.join_as_another, impostors.judge_identity, settings=CALM,
    ),
    Attack(
        9, "another's calls", CERTIFICATE, "Push, Attend and Leave in another's name",
        "refused", impostors.act_as_another, impostors.judge_identity, settings=CALM,
    ),
    Attack(
        11, "slow ghosts", TOKEN, "5 ghosts that report 10^6 s per step",
        "the grace window stays; rounds go on", lies.slow_ghosts, lies.judge_grace, seconds=4.0,
    ),
    Attack(
        12, "fast steps", TOKEN, "1,000 steps more per report, 50 reports a second",
        "among strangers rounds take the steps of more than half", lies.fast_steps, lies.judge_rounds, learners=TWO,
        seconds=4.0, settings={"sync.sync_every": lies.SPARSE, "guard.trust": "strangers"},
    ),
    Attack(
        16, "first model", TOKEN, "the first Join on a fresh shard brings another model, and seeds it",
        "refused by the digest; honest learners train", impostors.first_model, impostors.judge_model,
        settings={"run.model": digest_of(TinyText())}, fresh=True,
    ),
    Attack(
        18, "ghosts", CERTIFICATE, "1,024 ids and its own, joined again and again",
        "no lease for any of them; other learners join", impostors.ghosts, impostors.judge_ghosts, late=True,
    ),
]  # fmt: skip

ATTACKS = {attack.number: attack for attack in _ROWS}
