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


_HERE = "diloco_deploy.commands"


class Command(NamedTuple):
    """One row: its name, where it is (module:function, or module:app), what it does, and with whom it is shown."""

    name: str
    at: str
    about: str
    group: Group


COMMANDS = (
    Command("up", f"{_HERE}.up:up", "run a cluster on this machine until its token budget is reached", RUN),
    Command("init", f"{_HERE}.init:init", "make a folder to begin with: run.toml and train.py", RUN),
    Command(
        "resume", f"{_HERE}.resume:resume", "go on with a run, as it was, or on another number of shards", RUN
    ),
    Command("scale", f"{_HERE}.scale:scale", "change the number of workers of a running cluster", RUN),
    Command("status", f"{_HERE}.status:status", "show a running cluster", LOOK),
    Command("web", f"{_HERE}.web:web", "the live page of a run, in a browser", LOOK),
    Command("logs", f"{_HERE}.logs:logs", "show the logs of a cluster on this machine", LOOK),
    Command("health", f"{_HERE}.health:health", "ask one process whether it is healthy", LOOK),
    Command("doctor", f"{_HERE}.doctor:doctor", "say what is wrong with the way to the shards, or a machine", LOOK),
    Command("explain", f"{_HERE}.explain:explain", "say what a code means, and what to do", LOOK),
    Command("plan", f"{_HERE}.plan:app", "settings and sizes of a run, from its model, learners and links", LOOK),
    Command(
        "checkpoint", f"{_HERE}.checkpoint:app", "take, list, verify and copy checkpoints", MODEL
    ),
    Command(
        "restore", f"{_HERE}.checkpoint:restore",
        "make data folders from a checkpoint, for any number of shards", MODEL,
    ),
    Command(
        "export", f"{_HERE}.checkpoint:export",
        "write the model as one safetensors file with its own parameter names", MODEL,
    ),
    Command(
        "pull", f"{_HERE}.pull:pull", "write the global model of a running cluster, for from_pretrained",
        MODEL,
    ),
    Command(
        "certs", f"{_HERE}.certs:app", "make the certificates of a run, show them, and revoke them", TRUST
    ),
    Command(
        "token", f"{_HERE}.token:app", "make a token that all share, or a signed one for one caller",
        TRUST,
    ),
    Command(
        "lab", "diloco_lab.cli:app",
        "compare rules and settings by what they learn: production cores in one process, virtual time", STUDY,
    ),
    Command(
        "chaos", f"{_HERE}.chaos:chaos",
        "inject faults into a cluster on this machine, and check that nothing is lost", STUDY,
    ),
    Command("config", f"{_HERE}.config:app", "show the settings of a run, and where each one comes from", SETTINGS),
    Command("completion", f"{_HERE}.completion:completion", "print the completion of bash, zsh or fish", SETTINGS),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `diloco` command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_app(program(words[0] if words else ""), words)


def program(asked: str = "") -> App:
    """`diloco` with all of its commands, none of them imported yet. `asked`: the one whose help is told at length."""
    app = new_app("diloco", "Train one model on many machines that fail, lag and sit behind thin links.")
    for order, (name, at, about, group) in enumerate(COMMANDS):
        app.command(at, name=name, help=None if name == asked else about, group=group, sort_key=order)
    return app
