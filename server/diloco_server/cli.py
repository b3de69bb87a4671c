"""`diloco-server`: run one shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_common.allocator import tune_allocator
from diloco_common.command import CommandParser, end_on_sigterm, run_command
from diloco_common.settings_loader import add_settings_arguments, settings_from_args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_command(lambda: _serve(argv), name="diloco-server")


def _serve(argv: Sequence[str] | None) -> None:
    parser = CommandParser(prog="diloco-server", description="Run one shard of the parameter server.")
    parser.add_argument("--listen", metavar="HOST:PORT", help="address of gRPC (shard.listen)")
    parser.add_argument("--http", metavar="HOST:PORT", help="address of metrics and status (shard.http)")
    parser.add_argument("--index", metavar="I", help="which shard this is, counted from 0 (shard.index)")
    parser.add_argument("--count", metavar="S", help="how many shards the run has (shard.count)")
    parser.add_argument("--address-file", type=Path, metavar="FILE", help="write the bound addresses here")
    parser.add_argument("--verbose", action="store_true", help="log every round")
    add_settings_arguments(parser)
    args = parser.parse_args(argv)
    flags = {"listen": "shard.listen", "http": "shard.http", "index": "shard.index", "count": "shard.count"}
    settings = settings_from_args(args, flags)

    end_on_sigterm()
    tune_allocator()  # before threads and large buffers
    import asyncio
    import logging

    import torch

    from diloco_common import logs
    from diloco_server.server import serve

    logs.configure(level=logging.DEBUG if args.verbose else logging.INFO)
    torch.set_num_threads(1)  # one compute thread per shard: OpenMP teams collapse where cores are busy
    asyncio.run(serve(settings, args.address_file))


if __name__ == "__main__":
    sys.exit(main())
