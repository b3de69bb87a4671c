"""`diloco health`. Containers run `python -m diloco_deploy.health` instead, which loads less."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.errors import ConfigError
from diloco_deploy.health import TLS_VARIABLE, check


def health(
    *,
    grpc: Annotated[
        str | None, Parameter(metavar="HOST:PORT", help="of a shard; healthy if grpc.health.v1 says SERVING")
    ] = None,
    http: Annotated[
        str | None, Parameter(metavar="HOST:PORT", help="of a shard or worker; healthy if /readyz says so")
    ] = None,
    tls: Annotated[
        Path | None,
        Parameter(
            metavar="FOLDER", help="it serves over TLS: a folder of `diloco certs issue`, such as its own",
            show_default=f"${TLS_VARIABLE}",
        ),
    ] = None,
) -> int:  # fmt: skip
    """Ask one process whether it is healthy. Exit code 0 if it is, 1 if not."""
    if (grpc is None) == (http is None):
        raise ConfigError("give --grpc or --http, one of them: diloco health --grpc 127.0.0.1:50051")
    given = os.environ.get(TLS_VARIABLE)
    return check(grpc, http, tls or (Path(given) if given else None))
