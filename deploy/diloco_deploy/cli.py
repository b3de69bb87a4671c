"""The command line of `diloco`. Imports neither torch nor grpc, so its help is fast."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from diloco_common.command import CommandParser, run_command
from diloco_common.settings_loader import Given, add_settings_arguments, load, settings_from_args
from diloco_deploy import health
from diloco_deploy.checkpoint.arguments import COMMANDS, add_commands, with_action

_UP_FLAGS = {
    "shards": "cluster.shards",
    "workers": "cluster.workers",
    "folder": "cluster.folder",
    "tokens": "run.tokens",
    "seed": "run.seed",
    "data": "data.source",
}

_CHAOS_FLAGS = {name: setting for name, setting in _UP_FLAGS.items() if name in ("shards", "workers", "folder", "seed")}
_Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `diloco` command; returns its exit code."""
    return run_command(lambda: _run(argv), name="diloco")


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(with_action(sys.argv[1:] if argv is None else argv))
    if args.command == "up":
        return _up(args)
    if args.command == "chaos":
        return _chaos(args)
    if args.command == "status":
        return _status(args)
    if args.command == "health":
        return health.check(args.grpc, args.http)
    if args.command == "token":
        return _token(args.file)
    if args.command in COMMANDS:
        from diloco_deploy.checkpoint.commands import run

        return run(args)
    parser.print_help()
    return 0


def _up(args: argparse.Namespace) -> int:
    from diloco_deploy.folder import Outputs
    from diloco_deploy.up import bring_up

    settings = settings_from_args(args, _UP_FLAGS)
    return bring_up(settings, Outputs(report=args.report, model=args.export), fresh=args.fresh)


def _chaos(args: argparse.Namespace) -> int:
    from diloco_deploy.chaos.command import DEFAULTS, Chaos, run_chaos

    settings = settings_from_args(args, _CHAOS_FLAGS, defaults=DEFAULTS)
    return run_chaos(
        settings,
        Chaos(
            seconds=60.0 * args.minutes,
            every_s=args.every,
            dead_share=args.dead,
            gap_max_s=args.gap,
            disk_full=args.disk_full,
            json=args.json,
            timeline=args.timeline,
            baseline=args.baseline,
            compared=not args.no_baseline,
        ),
    )


def _status(args: argparse.Namespace) -> int:
    from rich.console import Console

    from diloco_deploy.status import show_status

    flags = {"cluster.folder": Given(args.folder, "--folder")} if args.folder else {}
    folder = load(None, os.environ, flags=flags).settings.cluster.folder
    http = [address.strip() for address in (args.http or "").split(",") if address.strip()]
    return show_status(folder, http, as_text=not args.json, console=Console())


def _token(path: Path) -> int:
    from diloco_deploy.token import make_bearer_token

    print(f"{path}: {'made' if make_bearer_token(path) else 'exists already'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="diloco",
        description="Train one model on many machines that fail, lag and sit behind thin links.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"diloco {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)
    for add in (_add_up, _add_chaos, _add_status, _add_health, _add_token, add_commands):
        add(commands)
    return parser


def _add_up(commands: _Commands) -> None:
    up = commands.add_parser(
        "up",
        help="run a cluster on this machine until its token budget is reached",
        description="Run shards and workers as processes of this machine and show their state. At the end, evaluate "
        "and export the global model. Ctrl-C ends the run in order, a second one at once.",
        allow_abbrev=False,
    )
    up.add_argument("--shards", metavar="N", help="parameter-server processes")
    up.add_argument("--workers", metavar="N", help="learners")
    up.add_argument("--tokens", metavar="N", help="end when this many tokens are merged (0: never)")
    up.add_argument("--seed", metavar="N", help="seed of the initial weights and of the order of the data")
    up.add_argument("--data", metavar="PATH", help="file or folder of text, or 'stdlib'")
    up.add_argument("--folder", metavar="PATH", help="folder for versions, logs, addresses and results")
    up.add_argument("--fresh", action="store_true", help="delete the run in the folder and begin anew")
    up.add_argument("--report", type=Path, metavar="FILE.json", help="default: report.json in the folder")
    up.add_argument("--export", type=Path, metavar="FILE.safetensors", help="default: model.safetensors in the folder")
    add_settings_arguments(up)


def _add_chaos(commands: _Commands) -> None:
    chaos = commands.add_parser(
        "chaos",
        help="inject faults into a cluster on this machine, and check that nothing is lost",
        description="Run a cluster on this machine without faults. Then run one, and kill and freeze its workers and "
        "shards by a seeded plan. Every process records its history. The histories show how much work got through, and "
        "whether any was lost or counted twice. Exit code 1 if a promise was broken.",
        allow_abbrev=False,
    )
    chaos.add_argument("--minutes", type=_minutes, default=1.0, metavar="M", help="length of each run (default 1)")
    chaos.add_argument("--every", type=_seconds, default=5.0, metavar="5s", help="time between two faults (default 5s)")
    chaos.add_argument("--shards", metavar="N", help="parameter-server processes")
    chaos.add_argument("--workers", metavar="N", help="learners (default 8)")
    chaos.add_argument("--seed", metavar="N", help="seed of the plan, the initial weights and the order of the data")
    chaos.add_argument(
        "--dead",
        type=_share,
        default=0.2,
        metavar="SHARE",
        help="share of time for which workers are dead or frozen (default 0.2)",
    )
    chaos.add_argument(
        "--gap",
        type=_seconds,
        default=3.0,
        metavar="3s",
        help="longest time that a living worker may go without a step (default 3s)",
    )
    chaos.add_argument("--disk-full", action="store_true", help="fill the disks of shards too (needs root)")
    chaos.add_argument("--json", type=Path, metavar="FILE.json", help="write the result here")
    chaos.add_argument("--timeline", type=Path, metavar="FILE.png|svg", help="draw a timeline of the run")
    chaos.add_argument("--baseline", type=Path, metavar="FILE.json", help="use the fault-free run of an earlier --json")
    chaos.add_argument("--no-baseline", action="store_true", help="no fault-free run: half the time, but no goodput")
    chaos.add_argument("--folder", metavar="PATH", help="folder for histories and logs (default runs/chaos)")
    add_settings_arguments(chaos)


def _add_status(commands: _Commands) -> None:
    status = commands.add_parser(
        "status", help="show a running cluster", description="Show a running cluster.", allow_abbrev=False
    )
    status.add_argument("--json", action="store_true", help="print everything as JSON")
    status.add_argument("--folder", metavar="PATH", help="folder of the cluster that `diloco up` runs")
    status.add_argument("--http", metavar="HOST:PORT,...", help="ask these processes instead")


def _add_health(commands: _Commands) -> None:
    well = commands.add_parser(
        "health",
        help="ask one process whether it is healthy",
        description="Ask one process whether it is healthy. Exit code 0 if it is, 1 if not.",
        allow_abbrev=False,
    )
    health.add_arguments(well)


def _add_token(commands: _Commands) -> None:
    token = commands.add_parser(
        "token",
        help="make the bearer token for shards and workers",
        description="Write a random bearer token to a file that only you can read. Keeps an existing file.",
        allow_abbrev=False,
    )
    token.add_argument("file", type=Path, metavar="FILE")


def _number(text: str, low: float, high: float, words: str) -> float:
    """Raises ArgumentTypeError unless it is a number from `low` to `high`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text}: must be {words}")
    return value


def _minutes(text: str) -> float:
    return _number(text, 0.01, 10_000.0, "minutes, from 0.01 to 10000")


def _seconds(text: str) -> float:
    return _number(text.removesuffix("s"), 0.1, 10_000.0, "seconds, from 0.1 to 10000, such as 5s")


def _share(text: str) -> float:
    return _number(text, 0.0, 0.9, "a share, from 0 to 0.9")


def _version() -> str:
    try:
        return metadata.version("decoupled-diloco")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
