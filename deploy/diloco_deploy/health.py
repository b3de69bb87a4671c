"""Checks whether a process on this machine is healthy. A container's HEALTHCHECK runs this.

It runs every few seconds beside a training process, so it must be cheap: `python -m diloco_deploy.health` is `diloco
health` without the rest of the command line. It imports grpc only for a shard, and neither torch nor the settings. Over
TLS, a shard requires a certificate of the run, such as its own; HTTP needs only ca.pem.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from diloco_deploy import ASK_S
from diloco_deploy.cluster import reading

TLS_VARIABLE = "DILOCO_SECURITY__TLS"
"""The TLS setting, which a process and its health check share in a container."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer of the process. Returns 0 if it is healthy, 1 if not."""
    parser = argparse.ArgumentParser(prog="diloco health", description="Ask a process whether it is healthy.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--grpc", metavar="HOST:PORT", help="of a shard; it is healthy if grpc.health.v1 says SERVING")
    which.add_argument("--http", metavar="HOST:PORT", help="of a shard or worker; it is healthy if /readyz says so")
    parser.add_argument(
        "--tls", type=Path, metavar="FOLDER",
        help=f"if it serves over TLS: a folder of `diloco certs issue`, such as its own (default: ${TLS_VARIABLE})",
    )  # fmt: skip
    args = parser.parse_args(argv)
    return check(args.grpc, args.http, args.tls)


def check(grpc_address: str | None, http_address: str | None, tls: Path | None) -> int:
    """The exit code for one of the two addresses."""
    if tls is None and (given := os.environ.get(TLS_VARIABLE)):
        tls = Path(given)
    try:
        well, words = _ask_grpc(grpc_address, tls) if grpc_address else _ask_http(http_address or "", tls)
    except (OSError, ssl.SSLError) as error:
        well, words = False, f"{tls} cannot be used: {error}"
    print(words)
    return 0 if well else 1


def _ask_grpc(address: str, tls: Path | None) -> tuple[bool, str]:
    """Raises OSError."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        found = grpc.insecure_channel(address, options=options)
    else:
        ca, key, chain = ((tls / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem"))
        found = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, chain), options=options)
    with found as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ASK_S)
        except grpc.RpcError as error:
            return False, f"{address} does not answer: {error.code().name.lower()}"
    kinds = health_pb2.HealthCheckResponse.ServingStatus
    word = kinds.Name(answer.status) if answer.status in kinds.values() else "UNKNOWN"
    return answer.status == health_pb2.HealthCheckResponse.SERVING, word.lower().replace("_", " ")


def _ask_http(address: str, tls: Path | None) -> tuple[bool, str]:
    """Raises OSError."""
    context = None
    if tls is not None:
        context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
        context.check_hostname = False  # a worker's certificate names no host
    try:
        code, body = reading.get(address, "/readyz", ASK_S, tls=context)
        return code == HTTPStatus.OK, str(reading.read_json(body)["reason"])
    except (OSError, ValueError) as error:
        return False, f"{address} does not answer: {error}"
    except KeyError:
        return False, f"{address} answers {code}, but not like one of our processes"


if __name__ == "__main__":
    sys.exit(main())
