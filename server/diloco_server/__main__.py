"""`diloco-server`: run one shard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.command import end_on_sigterm, leave, new_app, run_app
from diloco_common.options import NO_SETTINGS, Flag, SettingsOptions, setting, settings_from
from diloco_common.process import tune_allocator

app = new_app("diloco-server", "Run one shard of the parameter server.")


@app.default
def serve(
    *,
    listen: Annotated[str | None, setting("shard.listen", "HOST:PORT", "address of gRPC")] = None,
    http: Annotated[str | None, setting("shard.http", "HOST:PORT", "address of metrics and status")] = None,
    index: Annotated[str | None, setting("shard.index", "I", "which shard this is, counted from 0")] = None,
    count: Annotated[str | None, setting("shard.count", "S", "how many shards the run has")] = None,
    mirror_of: Annotated[str | None, setting("shard.mirror_of", "HOST:PORT", "be a mirror of this shard")] = None,
    standby_of: Annotated[str | None, setting("shard.standby_of", "HOST:PORT", "be a standby of this shard")] = None,
    site: Annotated[str | None, setting("run.site", "NAME", "site of a mirror")] = None,
    data_dir: Annotated[str | None, setting("shard.data_dir", "FOLDER", "its versions")] = None,
    tls: Annotated[str | None, setting("security.tls", "FOLDER", "its certificate, by `diloco certs issue`")] = None,
    insecure: Annotated[Flag, Parameter(help="plaintext on any address (security.insecure)")] = False,
    address_file: Annotated[Path | None, Parameter(metavar="FILE", help="write the bound addresses here")] = None,
    verbose: Annotated[Flag, Parameter(help="log every round")] = False,
    options: SettingsOptions = NO_SETTINGS,
) -> None:
    """Run one shard of the parameter server, until SIGTERM or Ctrl-C."""
    flags = {
        "shard.listen": listen, "shard.http": http, "shard.index": index, "shard.count": count, "security.tls": tls,
        "shard.mirror_of": mirror_of, "shard.standby_of": standby_of, "run.site": site, "shard.data_dir": data_dir,
        "security.insecure": insecure or None,
    }  # fmt: skip
    settings = settings_from(options, flags)

    end_on_sigterm()
    tune_allocator()  # before threads and large buffers
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise any caller's failed handshake writes a line
    import asyncio
    import gc
    import logging

    import torch

    from diloco_common.observe import logs
    from diloco_server.shell import server

    gc.collect()
    gc.freeze()  # full collections in the event loop then skip the modules: 100 ms for torch's
    logs.configure(level=logging.DEBUG if verbose else logging.INFO)
    torch.set_num_threads(1)  # one compute thread per shard: OpenMP teams are slow on busy cores
    asyncio.run(server.serve(settings, address_file))


def main(argv: Sequence[str] | None = None) -> int:
    return run_app(app, argv)


if __name__ == "__main__":
    leave(main())
