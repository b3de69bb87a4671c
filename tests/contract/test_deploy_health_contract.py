"""What a container's HEALTHCHECK hears: 0 if the process is well, 1 and a word why if not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from in_process import settings_with
from prometheus_client import CollectorRegistry

from diloco_common import command as cli
from diloco_common.observe.http import HttpServer
from diloco_deploy.health import main

STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def health_service() -> Iterator[tuple[str, health.HealthServicer]]:
    """Address of a server that has the health service, and the service."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", service
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(STATUS.SERVING, 0, "serving"), (STATUS.NOT_SERVING, 1, "not serving"), (STATUS.UNKNOWN, 1, "unknown")],
)
def test_a_shard_is_well_while_its_health_service_says_so(health_service, capsys, status, code, words) -> None:
    address, service = health_service
    service.set("", status)
    assert main(["--grpc", address]) == code
    assert cli.main(["health", "--grpc", address]) == code
    assert capsys.readouterr().out == f"{words}\n{words}\n"


@pytest.mark.parametrize(("ready", "code"), [((True, "joined"), 0), ((False, "2 of 4 fragments are not there yet"), 1)])
def test_a_worker_is_well_while_it_is_ready(capsys, loop, ready: tuple[bool, str], code: int) -> None:
    server = HttpServer("127.0.0.1:0", registry=CollectorRegistry(), status=dict, ready=lambda: ready)
    address = loop.run(server.start())
    try:
        assert main(["--http", address]) == code
    finally:
        loop.run(server.stop())
    assert capsys.readouterr().out == f"{ready[1]}\n"


def test_a_shard_that_asks_for_certificates_is_asked_with_its_own(serve, run, capsys, monkeypatch) -> None:
    own = run.issue("shard/0")
    shard = serve(settings_with(security={"tls": own}))
    assert main(["--grpc", shard.address, "--tls", str(own)]) == 0
    monkeypatch.setenv("DILOCO_SECURITY__TLS", str(own))
    assert main(["--grpc", shard.address]) == 0, "in its container, both have one environment"
    assert main(["--http", shard.server.http_address]) == 0
    monkeypatch.delenv("DILOCO_SECURITY__TLS")
    assert main(["--grpc", shard.address]) == 1
    assert main(["--http", shard.server.http_address]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["serving", "serving"]


@pytest.mark.parametrize("flag", ["--grpc", "--http"])
def test_nobody_who_answers_is_not_well(capsys, flag: str) -> None:
    assert main([flag, "127.0.0.1:1"]) == 1
    assert capsys.readouterr().out.startswith("127.0.0.1:1 does not answer: ")
