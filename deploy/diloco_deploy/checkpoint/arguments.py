"""The command lines of `diloco checkpoint`, `restore` and `export`. Imports nothing slow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from diloco_common.command import CommandParser

TAKE = "take"
_ACTIONS = (TAKE, "list", "verify", "copy")
COMMANDS = ("checkpoint", "restore", "export")
_SOURCE = "the folder of `diloco up`, data folders of shards, checkpoints, or URLs of checkpoints"


def with_action(argv: Sequence[str]) -> list[str]:
    """`diloco checkpoint FOLDER` is short for `diloco checkpoint take FOLDER`."""
    words = list(argv)
    if len(words) > 1 and words[0] == "checkpoint" and words[1] not in (*_ACTIONS, "-h", "--help"):
        words.insert(1, TAKE)
    return words


def add_commands(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the three commands to the parser of `diloco`."""
    checkpoint = commands.add_parser(
        "checkpoint",
        help="take, list, verify and copy checkpoints",
        description="`diloco checkpoint FOLDER` takes a checkpoint at once: hard links to the newest version of each "
        "fragment. The shards may run or not.",
        allow_abbrev=False,
    )
    actions = checkpoint.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=CommandParser)
    take = actions.add_parser(TAKE, help="take one (the default)", allow_abbrev=False)
    take.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of `diloco up`, or data folders of shards"
    )
    take.add_argument("--name", metavar="NAME", help="default: the time")
    take.add_argument("--into", type=Path, metavar="PATH", help="default: `checkpoints` in the (first) folder")
    _add_json(take)
    listing = actions.add_parser("list", help="show all checkpoints in a folder", allow_abbrev=False)
    listing.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", default=[Path("runs/local")])
    _add_json(listing)
    verify = actions.add_parser("verify", help="check every byte; exit code 3 if one is wrong", allow_abbrev=False)
    verify.add_argument(
        "checkpoints", nargs="+", metavar="CHECKPOINT", help="folder or URL; several: the parts of one checkpoint"
    )
    _add_json(verify)
    copy = actions.add_parser("copy", help="copy one to an object store", allow_abbrev=False)
    copy.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or URL")
    copy.add_argument("url", metavar="URL", help="s3://BUCKET/PATH, gs://..., az://... or file:///PATH")

    restore = commands.add_parser(
        "restore",
        help="make data folders from a checkpoint, for any number of shards",
        description="Restore parameters and outer momentum bit for bit, on any number of shards.",
        allow_abbrev=False,
    )
    restore.add_argument("sources", nargs="+", metavar="CHECKPOINT", help=_SOURCE)
    restore.add_argument("--shards", type=int, required=True, metavar="M", help="shards of the restored run")
    restore.add_argument(
        "--folder", type=Path, required=True, metavar="DEST", help="a new folder, for shard-0, shard-1, ..."
    )

    export = commands.add_parser(
        "export",
        help="write the model as one safetensors file with its own parameter names",
        description="Write the model as one safetensors file. Plain torch can load it.",
        allow_abbrev=False,
    )
    export.add_argument("sources", nargs="+", metavar="SOURCE", help=_SOURCE)
    export.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print it as JSON")
