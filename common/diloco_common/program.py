"""The `diloco` command: one program with the commands of every installed distribution.

A distribution names its table of commands as an entry point of the group `diloco.commands`. A command's module is
imported only for that command, and imports neither torch nor grpc before its function runs, so help is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import NamedTuple, NoReturn

from cyclopts import App, Group

from diloco_common.command import new_app, run_app, run_command
from diloco_common.errors import ConfigError, plain

RUN = Group("Run", sort_key=1)
LOOK = Group("Look", sort_key=2)
MODEL = Group("Model", sort_key=3)
TRUST = Group("Who may call", sort_key=4)
STUDY = Group("Try out", sort_key=5)
SETTINGS = Group("Settings", sort_key=6)


class Command(NamedTuple):
    """One row of a table: the command's name, its module:function or module:app, its description, and its group."""

    name: str
    at: str
    about: str
    group: Group


ELSEWHERE: Mapping[str, Sequence[str]] = {
    "decoupled-diloco-ops": (
        "up", "init", "resume", "scale", "status", "record", "web", "logs", "health", "doctor", "explain", "checkpoint",
        "restore", "promote", "export", "pull", "certs", "token", "config", "completion",
    ),
    "decoupled-diloco-lab": ("plan", "simulate", "lab"),
}  # fmt: skip
"""Distribution -> its commands, for the message about a command that is not installed."""
IN_A_CLONE: Mapping[str, str] = {"decoupled-diloco-ops": "./deploy", "decoupled-diloco-lab": "./simulator"}
"""Distribution -> its folder in a clone, for which an index has no package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `diloco` command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    asked = words[0] if words else ""
    if where := missing(installed()).get(asked):
        return run_command(partial(_refuse, where), name=f"diloco {asked}")
    return run_app(program(asked), words)


def installed() -> list[Command]:
    """The tables of all distributions, concatenated. Prints and skips one that cannot be imported."""
    found: list[Command] = []
    for point in metadata.entry_points(group="diloco.commands"):
        try:
            found += point.load()
        except Exception as error:
            where = point.dist.name if point.dist else point.value
            print(f"diloco: the commands of {where} cannot be imported: {plain(str(error))}", file=sys.stderr)
    return found


def missing(commands: Sequence[Command]) -> dict[str, str]:
    """Commands of ours that are not among these -> the distribution that brings them."""
    here = {command.name for command in commands}
    return {name: distribution for distribution, names in ELSEWHERE.items() for name in names if name not in here}


def _refuse(distribution: str) -> NoReturn:
    raise ConfigError(f"not installed; pip install {distribution} (in a clone: pip install {IN_A_CLONE[distribution]})")


def program(asked: str = "") -> App:
    """`diloco` with all installed commands, none imported yet. `asked`: the command whose full help is shown."""
    commands = installed()
    about = ["Train one model on many machines that fail, lag and sit behind thin links."]
    absent = missing(commands)
    for distribution in dict.fromkeys(absent.values()):
        names = ", ".join(name for name, where in absent.items() if where == distribution)
        about.append(f"Not installed (pip install {distribution}): {names}")
    app = new_app("diloco", "\n\n".join(about))
    for order, (name, at, line, group) in enumerate(commands):
        app.command(at, name=name, help=None if name == asked else line, group=group, sort_key=order)
    return app
