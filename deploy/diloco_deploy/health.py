"""Asks a process of this machine whether it is healthy. A container's HEALTHCHECK runs this.

It runs every few seconds beside a training process, so it must be cheap: `python -m diloco_deploy.health` is
`diloco health` without the rest of the command line. It imports grpc only for a shard, and neither torch nor the
settings.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

TIMEOUT_S = 3.0

# Never through a proxy of the environment: this is our own process.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer of the process. Returns 0 if it is healthy, 1 if not."""
    parser = argparse.ArgumentParser(prog="diloco health", description="Ask a process whether it is healthy.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    return check(args.grpc, args.http)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--grpc", metavar="HOST:PORT", help="of a shard; it is healthy if grpc.health.v1 says SERVING")
    which.add_argument("--http", metavar="HOST:PORT", help="of a shard or worker; it is healthy if /readyz says so")


def check(grpc_address: str | None, http_address: str | None) -> int:
    """The exit code for one of the two addresses."""
    well, words = _ask_grpc(grpc_address) if grpc_address else _ask_http(http_address or "")
    print(words)
    return 0 if well else 1


def _ask_grpc(address: str) -> tuple[bool, str]:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return False, f"{address} does not answer: {error.code().name.lower()}"
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return answer.status == health_pb2.HealthCheckResponse.SERVING, word.lower().replace("_", " ")


def _ask_http(address: str) -> tuple[bool, str]:
    try:
        with _opener.open(f"http://{address}/readyz", timeout=TIMEOUT_S) as answer:
            return True, str(json.load(answer)["reason"])
    except urllib.error.HTTPError as error:
        return False, str(json.load(error)["reason"])
    except (OSError, ValueError, KeyError) as error:
        return False, f"{address} does not answer: {error}"


if __name__ == "__main__":
    sys.exit(main())
