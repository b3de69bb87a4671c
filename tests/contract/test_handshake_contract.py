"""Where no connection comes about, the cause is named at the caller, with what to do."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from in_process import InProcessShard, settings_with
from training import tiny_model

import diloco_worker
from certificates import Certificates
from diloco_common.errors import CannotConnect, HandshakeFailed, NoCertificate, NotAShard, TlsNotSpoken
from diloco_common.trust.identity import Identity
from diloco_common.trust.tls import read_folder
from diloco_common.wire.handshake import find_cause
from diloco_common.wire.messages import PROTOCOL, JoinRequest
from diloco_worker.global_model import pull_global_model
from diloco_worker.shell.credentials import Credentials
from diloco_worker.shell.grpc_transport import GrpcTransport


@pytest.fixture
def run(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certs")


@pytest.fixture
def shard(serve: Callable[..., InProcessShard], run: Certificates) -> InProcessShard:
    return serve(settings_with(security={"tls": run.issue("shard/0")}))


def cause_at(address: str, folder: Path | None) -> HandshakeFailed | None:
    return find_cause(address, None if folder is None else read_folder(folder))


def without_pair(run: Certificates, folder: Path) -> Path:
    folder.mkdir()
    (folder / "ca.pem").write_bytes((run.authority.folder / "ca.pem").read_bytes())
    return folder


def mixed(run: Certificates, folder: Path, other: Certificates, *, foreign: str) -> Path:
    """A learner's folder in which some files are of another authority."""
    source = run.issue("learner/a")
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((source / name).read_bytes())
        (folder / name).chmod(0o600)
    theirs = other.issue("learner/a")
    for name in foreign.split():
        (folder / name).write_bytes((theirs / name).read_bytes())
    return folder


@contextmanager
def served(listener: socket.socket, talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a listener. `talk` is had with each caller, on a thread of its own."""

    def serve() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:  # the test has ended
                return
            threading.Thread(target=talk, args=(accepted,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    host, port = listener.getsockname()
    yield f"{host}:{port}"
    listener.close()


@contextmanager
def forwarded(address: str) -> Iterator[str]:
    """The same port under another address of this machine."""
    host, _, port = address.rpartition(":")

    def talk(theirs: socket.socket) -> None:
        ours = socket.create_connection((host, int(port)))
        threading.Thread(target=pump, args=(ours, theirs), daemon=True).start()
        pump(theirs, ours)

    def pump(a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while block := a.recv(65536):
                b.sendall(block)
            b.shutdown(socket.SHUT_WR)

    with served(socket.create_server(("127.0.0.2", 0)), talk) as there:
        yield there


@contextmanager
def tls_server(folder: Path) -> Iterator[str]:
    """Another server than gRPC's, which asks for certificates and says what it minds."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    def talk(accepted: socket.socket) -> None:
        with accepted, suppress(OSError):
            context.wrap_socket(accepted, server_side=True)

    with served(socket.create_server(("127.0.0.1", 0)), talk) as address:
        yield address


def test_all_is_well(shard, run):
    assert cause_at(shard.address, run.issue("learner/a")) is None


def test_a_caller_without_a_certificate(shard, run, tmp_path):
    found = cause_at(shard.address, without_pair(run, tmp_path / "bare"))
    assert isinstance(found, NoCertificate)
    assert "asks for a certificate" in str(found)


@pytest.mark.parametrize(
    ("begins", "code", "words"),
    [
        (timedelta(days=-3), "CERTIFICATE_EXPIRED", "diloco certs issue learner/a"),
        (timedelta(days=3), "CERTIFICATE_NOT_YET_VALID", "set the clock"),
    ],
)
def test_a_certificate_out_of_its_time(shard, run, begins, code, words):
    found = cause_at(shard.address, run.issue("learner/a", begins=begins))
    assert found is not None
    assert found.code == code
    assert words in str(found)
    assert "this machine's clock" in str(found)


@pytest.mark.parametrize("foreign", ["cert.pem key.pem", "ca.pem", "ca.pem cert.pem key.pem"])
def test_a_certificate_of_another_authority(shard, run, tmp_path, foreign):
    other = Certificates(tmp_path / "other")
    found = cause_at(shard.address, mixed(run, tmp_path / "mixed", other, foreign=foreign))
    assert found is not None
    assert found.code == "FOREIGN_CERTIFICATE"
    assert "ca.pem" in str(found) or "whole folder" in str(found)


def test_a_shard_of_another_authority_is_told_from_a_caller_of_one(shard, run, tmp_path):
    """Both sides trust the caller's CA file, and the shard's own file is another: only the shard refuses."""
    other = Certificates(tmp_path / "other")
    folder = mixed(run, tmp_path / "mixed", other, foreign="cert.pem key.pem")
    both = (folder / "ca.pem").read_bytes() + (other.authority.folder / "ca.pem").read_bytes()
    (folder / "ca.pem").write_bytes(both)

    found = cause_at(shard.address, folder)

    assert found is not None
    assert found.code == "FOREIGN_CERTIFICATE"
    assert "does not take the certificate" in str(found)


@pytest.mark.parametrize(
    ("begins", "code", "words"),
    [
        (timedelta(days=-3), "CERTIFICATE_EXPIRED", "diloco certs issue shard/N"),
        (timedelta(days=3), "CERTIFICATE_NOT_YET_VALID", "set the clock"),
    ],
)
def test_a_shard_whose_certificate_is_out_of_its_time(run, begins, code, words):
    with tls_server(run.issue("shard/0", begins=begins)) as address:
        found = cause_at(address, run.issue("learner/a"))
    assert found is not None
    assert found.code == code
    assert words in str(found)


def test_a_name_that_the_certificate_does_not_have(shard, run):
    with forwarded(shard.address) as address:
        found = cause_at(address, run.issue("learner/a"))
    assert found is not None
    assert found.code == "WRONG_HOST"
    assert "ps-0" in str(found)
    assert "--host 127.0.0.2" in str(found)


def test_plaintext_on_a_tls_port_and_the_reverse(shard, serve, run):
    plain = serve()
    assert cause_at(plain.address, None) is None
    needed, not_spoken = cause_at(shard.address, None), cause_at(plain.address, run.issue("learner/a"))
    assert needed is not None
    assert needed.code == "TLS_NEEDED"
    assert "security.tls" in str(needed)
    assert not_spoken is not None
    assert not_spoken.code == "TLS_NOT_SPOKEN"


def test_the_http_port_of_a_shard_says_where_the_shard_listens(serve):
    server = serve(settings_with()).server
    assert cause_at(server.grpc_address, None) is None
    with pytest.raises(NotAShard, match=f"gRPC: {server.grpc_address}"):
        diloco_worker.join(server.http_address, tiny_model(), http=None, wait_s=30.0)


def test_an_alert_is_heard_too(run, tmp_path):
    """Where another server than gRPC's ends TLS, it says why: after the handshake, in TLS 1.3."""
    with tls_server(run.issue("shard/0")) as address:
        found = cause_at(address, without_pair(run, tmp_path / "bare"))
    assert isinstance(found, NoCertificate)


def test_nobody_there_is_no_matter_of_tls(run):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert cause_at(address, run.issue("learner/a")) is None
        assert cause_at(address, None) is None


# ---------------------------------------------------------------- what becomes of it


def test_joining_ends_with_a_cause_that_waiting_does_not_mend(shard, written):
    with pytest.raises(HandshakeFailed) as ended:
        diloco_worker.join(shard.address, tiny_model(), learner_id="a", wait_s=20)
    assert (ended.value.code, ended.value.exit_code) == ("TLS_NEEDED", 5)
    assert "code=TLS_NEEDED" in written.getvalue(), "it was said before it was believed"


def test_joining_waits_for_a_renewal(shard, run, train, written):
    folder = run.issue("learner/a", begins=timedelta(days=-3))
    with pytest.raises(CannotConnect):
        diloco_worker.join(shard.address, tiny_model(), learner_id="a", tls=folder, wait_s=3.0)
    assert "code=CERTIFICATE_EXPIRED" in written.getvalue()

    run.issue("learner/a")
    train(shard.address, "a", tls=folder).step()

    assert shard.member_state("a") == "alive"


def test_an_observer_is_told_the_cause(serve, run):
    with pytest.raises(TlsNotSpoken):
        pull_global_model([serve().address], tls=run.issue("observer/x"), wait_s=4.0)


def test_the_cause_is_looked_for_at_the_first_failure_and_then_seldom(shard, loop, monkeypatch):
    looks: list[str] = []

    def look(address: str, *_: object) -> HandshakeFailed:
        looks.append(address)
        return TlsNotSpoken("so it is")

    monkeypatch.setattr("diloco_worker.shell.grpc_transport.find_cause", look)

    async def dial_again_and_again() -> None:
        transport = GrpcTransport(shard.address, Credentials())
        for _ in range(20):
            with pytest.raises(TlsNotSpoken):
                await transport.join(Identity("local", "a"), JoinRequest(PROTOCOL, "p"), 5.0)
        await transport.close(0.0)

    loop.run(dial_again_and_again())
    assert looks == [shard.address]
