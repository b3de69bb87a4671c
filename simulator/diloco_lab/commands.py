"""The commands of this distribution, which `diloco` finds here (`diloco_common/program.py`)."""

from __future__ import annotations

from diloco_common.program import STUDY, Command

COMMANDS = (
    Command(
        "plan", "diloco_planner.plan_command:app",
        "settings and sizes of a run, from its model, learners and links", STUDY,
    ),
    Command(
        "simulate", "diloco_planner.simulate_command:simulate",
        "a run on up to a million chips that fail: goodput, rounds, bytes, money", STUDY,
    ),
    Command(
        "lab", "diloco_lab.cli:app",
        "compare rules and settings by what they learn: production cores in one process, virtual time", STUDY,
    ),
)  # fmt: skip
