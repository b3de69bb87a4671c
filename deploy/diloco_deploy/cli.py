"""The command line of `diloco`; imports neither torch nor grpc, so that its help is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from diloco_common.command import CommandParser, run_command
from diloco_common.settings_loader import Given, add_settings_arguments, load, settings_from_args
from diloco_deploy.checkpoint.arguments import COMMANDS, add_commands, with_action

_UP_FLAGS = {
    "shards": "cluster.shards",
    "workers": "cluster.workers",
    "folder": "cluster.folder",
    "tokens": "run.tokens",
    "seed": "run.seed",
    "data": "data.source",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `diloco` command; returns its exit code."""
    return run_command(lambda: _run(argv), name="diloco")


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(with_action(sys.argv[1:] if argv is None else argv))
    if args.command == "up":
        return _up(args)
    if args.command == "status":
        return _status(args)
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


def _status(args: argparse.Namespace) -> int:
    from rich.console import Console

    from diloco_deploy.status import show_status

    flags = {"cluster.folder": Given(args.folder, "--folder")} if args.folder else {}
    folder = load(None, os.environ, flags=flags).settings.cluster.folder
    http = [address.strip() for address in (args.http or "").split(",") if address.strip()]
    return show_status(folder, http, as_text=not args.json, console=Console())


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="diloco",
        description="Train one model on many machines that fail, lag and sit behind thin links.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"diloco {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)

    up = commands.add_parser(
        "up",
        help="run a cluster on this machine until its token budget is reached",
        description="Run shards and workers as processes of this machine, show how they are doing, and at "
        "the end evaluate and export the global model. Ctrl-C ends it in order, a second one at once.",
        allow_abbrev=False,
    )
    up.add_argument("--shards", metavar="N", help="parameter-server processes")
    up.add_argument("--workers", metavar="N", help="learners")
    up.add_argument("--tokens", metavar="N", help="end when this many tokens were merged (0: never)")
    up.add_argument("--seed", metavar="N", help="of the initial weights and the order of the data")
    up.add_argument("--data", metavar="PATH", help="file or folder of text, or 'stdlib'")
    up.add_argument("--folder", metavar="PATH", help="where versions, logs, addresses and results go")
    up.add_argument("--fresh", action="store_true", help="delete the run in the folder and begin anew")
    up.add_argument("--report", type=Path, metavar="FILE.json", help="default: report.json in the folder")
    up.add_argument("--export", type=Path, metavar="FILE.safetensors", help="default: model.safetensors in the folder")
    add_settings_arguments(up)

    status = commands.add_parser(
        "status", help="show a running cluster", description="Show a running cluster.", allow_abbrev=False
    )
    status.add_argument("--json", action="store_true", help="print everything as JSON")
    status.add_argument("--folder", metavar="PATH", help="of the cluster that `diloco up` runs")
    status.add_argument("--http", metavar="HOST:PORT,...", help="ask these processes instead")
    add_commands(commands)
    return parser


def _version() -> str:
    try:
        return metadata.version("decoupled-diloco")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
