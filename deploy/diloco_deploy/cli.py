"""The command line of `diloco`: one table of commands, each imported when it is asked for.

A command's module imports neither torch nor grpc before its function runs, so help is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from cyclopts import App, Group

from diloco_common.command import new_app, run_app

RUN = Group("Run", sort_key=1)
LOOK = Group("Look", sort_key=2)
MODEL = Group("Model", sort_key=3)
TRUST = Group("Who may call", sort_key=4)
STUDY = Group("Try out", sort_key=5)
SETTINGS = Group("Settings", sort_key=6)


class Command(NamedTuple):
    """One row: its name, where it is (module:function, or module:app; below this package, unless it names another),
    what it does, and with whom it is shown."""

    name: str
    at: str
    about: str
    group: Group


COMMANDS = (
    Command("up", "run.commands:up", "run a cluster on this machine until its token budget is reached", RUN),
    Command("init", "run.commands:init", "make a folder to begin with: run.toml and train.py", RUN),
    Command(
        "resume", "run.commands:resume", "go on with a run, as it was, or on another number of shards", RUN
    ),
    Command("scale", "run.commands:scale", "change the number of workers of a running cluster", RUN),
    Command("status", "show.status:status", "show a running cluster", LOOK),
    Command("record", "show.record:record", "say whose work is in each version, with which weight", LOOK),
    Command("web", "web.command:web", "the live page of a run, in a browser", LOOK),
    Command("logs", "commands:logs", "show the logs of a cluster on this machine", LOOK),
    Command("health", "commands:health", "ask one process whether it is healthy", LOOK),
    Command("doctor", "doctor.command:doctor", "say what is wrong with the way to the shards, or a machine", LOOK),
    Command("explain", "explain.catalogue:explain", "say what a code means, and what to do", LOOK),
    Command(
        "plan", "diloco_planner.plan_command:app", "settings and sizes of a run, from its model, learners and links",
        LOOK,
    ),
    Command(
        "checkpoint", "checkpoint.commands:app", "take, list, verify and copy checkpoints", MODEL
    ),
    Command(
        "restore", "checkpoint.commands:restore",
        "make data folders from a checkpoint, for any number of shards", MODEL,
    ),
    Command(
        "promote", "checkpoint.promote:promote", "make a standby the shard, once the shard will not come back", MODEL
    ),
    Command(
        "export", "checkpoint.commands:export",
        "write the model as one safetensors file with its own parameter names", MODEL,
    ),
    Command(
        "pull", "checkpoint.commands:pull", "write the global model of a running cluster, for from_pretrained",
        MODEL,
    ),
    Command(
        "certs", "trust.commands:certs", "make the certificates of a run, show them, and revoke them", TRUST
    ),
    Command(
        "token", "trust.commands:token", "make the token that all share",
        TRUST,
    ),
    Command(
        "lab", "diloco_lab.cli:app",
        "compare rules and settings by what they learn: production cores in one process, virtual time", STUDY,
    ),
    Command(
        "simulate", "diloco_planner.simulate_command:simulate",
        "a run on up to a million chips that fail: goodput, rounds, bytes, money", STUDY,
    ),
    Command(
        "chaos", "chaos.command:chaos",
        "inject faults into a cluster on this machine, and check that nothing is lost", STUDY,
    ),
    Command("config", "commands:config", "show the settings of a run, and where each one comes from", SETTINGS),
    Command("completion", "commands:completion", "print the completion of bash, zsh or fish", SETTINGS),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `diloco` command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_app(program(words[0] if words else ""), words)


def program(asked: str = "") -> App:
    """`diloco` with all of its commands, none of them imported yet. `asked`: the one whose help is told at length."""
    app = new_app("diloco", "Train one model on many machines that fail, lag and sit behind thin links.")
    for order, (name, at, about, group) in enumerate(COMMANDS):
        app.command(
            at if at.startswith("diloco_") else f"diloco_deploy.{at}",
            name=name,
            help=None if name == asked else about,
            group=group,
            sort_key=order,
        )
    return app
