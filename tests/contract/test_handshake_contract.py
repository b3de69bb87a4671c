"""Where no connection comes about, the cause is named at the caller, with what to do."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessShard, settings_with
from training import tiny_model

import diloco_worker
from certificates import Certificates
from diloco_common.errors import CannotConnect, HandshakeFailed, NotAShard, TlsMismatch
from diloco_common.trust.credentials import Credentials
from diloco_common.trust.files import read_folder
from diloco_common.trust.identity import Identity
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.handshake import find_cause
from diloco_common.wire.messages import PROTOCOL, JoinRequest
from diloco_worker.global_model import pull_global_model


@pytest.fixture
def shard(serve: Callable[..., InProcessShard], run: Certificates) -> InProcessShard:
    return serve(settings_with(security={"tls": run.issue("shard/0")}))


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


Where = Callable[[Any, InProcessShard, Certificates], AbstractContextManager[str]]
Folder = Callable[[Certificates, Path], Path | None]


def at_the_shard(serve: Any, shard: InProcessShard, run: Certificates) -> AbstractContextManager[str]:
    return nullcontext(shard.address)


def at_plaintext(serve: Any, shard: InProcessShard, run: Certificates) -> AbstractContextManager[str]:
    return nullcontext(serve().address)


def under_another_name(serve: Any, shard: InProcessShard, run: Certificates) -> AbstractContextManager[str]:
    return forwarded(shard.address)


def at_a_server(**validity: timedelta) -> Where:
    """Another one than gRPC's. It says why: after the handshake, in TLS 1.3."""
    return lambda serve, shard, run: tls_server(run.issue("shard/0", **validity))


@contextmanager
def at_nobody(serve: Any, shard: InProcessShard, run: Certificates) -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and nobody listens
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def nothing(run: Certificates, here: Path) -> None:
    """Plaintext."""


def issued(**validity: timedelta) -> Folder:
    return lambda run, here: run.issue("learner/a", **validity)


def without_pair(run: Certificates, here: Path) -> Path:
    (here / "ca.pem").write_bytes((run.authority.folder / "ca.pem").read_bytes())
    return here


def foreign(*files: str, trusts_both: bool = False) -> Folder:
    """A learner's folder in which these files are of another authority."""

    def folder(run: Certificates, here: Path) -> Path:
        other = Certificates(here / "other")
        ours, theirs = run.issue("learner/a"), other.issue("learner/a")
        for name in ("ca.pem", "cert.pem", "key.pem"):
            (here / name).write_bytes(((theirs if name in files else ours) / name).read_bytes())
            (here / name).chmod(0o600)
        if trusts_both:
            with (here / "ca.pem").open("ab") as ca:
                ca.write((other.authority.folder / "ca.pem").read_bytes())
        return here

    return folder


PAIR = "cert.pem", "key.pem"
OLD, EARLY = {"begins": timedelta(days=-3)}, {"begins": timedelta(days=3)}
CAUSES: dict[str, tuple[Where, Folder, str, list[str]]] = {
    "all is well": (at_the_shard, issued(), "", []),
    "nor in plaintext": (at_plaintext, nothing, "", []),
    "no certificate": (at_the_shard, without_pair, "FOREIGN_CERTIFICATE", ["asks for a certificate"]),
    "no certificate, at another server": (at_a_server(), without_pair, "FOREIGN_CERTIFICATE", []),
    "too old": (at_the_shard, issued(**OLD), "CERTIFICATE_NOT_VALID",
                ["diloco certs issue learner/a", "this machine's clock"]),
    "not valid yet": (at_the_shard, issued(**EARLY), "CERTIFICATE_NOT_VALID",
                      ["set the clock", "this machine's clock"]),
    "the shard's is too old": (at_a_server(**OLD), issued(), "CERTIFICATE_NOT_VALID", ["diloco certs issue shard/N"]),
    "nor is the shard's": (at_a_server(**EARLY), issued(), "CERTIFICATE_NOT_VALID", ["set the clock"]),
    "a pair of others": (at_the_shard, foreign(*PAIR), "FOREIGN_CERTIFICATE", [r"ca\.pem|whole folder"]),
    "an authority of others": (at_the_shard, foreign("ca.pem"), "FOREIGN_CERTIFICATE", [r"ca\.pem|whole folder"]),
    "all of others": (at_the_shard, foreign("ca.pem", *PAIR), "FOREIGN_CERTIFICATE", [r"ca\.pem|whole folder"]),
    "only the shard refuses": (at_the_shard, foreign(*PAIR, trusts_both=True), "FOREIGN_CERTIFICATE",
                               ["does not take the certificate"]),
    "another host": (under_another_name, issued(), "WRONG_HOST", ["ps-0", "--host 127.0.0.2"]),
    "plaintext on a TLS port": (at_the_shard, nothing, "TLS_MISMATCH", [r"security\.tls"]),
    "TLS on a plaintext port": (at_plaintext, issued(), "TLS_MISMATCH", []),
    "nobody there is no matter of TLS": (at_nobody, issued(), "", []),
    "nor without it": (at_nobody, nothing, "", []),
}  # fmt: skip


@pytest.mark.parametrize(("where", "folder", "code", "words"), CAUSES.values(), ids=CAUSES)
def test_the_cause_is_named_with_what_to_do(serve, shard, run, tmp_path, where, folder, code, words):
    (here := tmp_path / "caller").mkdir()
    files = folder(run, here)
    with where(serve, shard, run) as address:
        found = find_cause(address, None if files is None else read_folder(files))
    assert ("" if found is None else found.code) == code
    assert all(re.search(word, str(found)) for word in words), found


def test_the_http_port_of_a_shard_says_where_the_shard_listens(serve):
    server = serve(settings_with()).server
    with pytest.raises(NotAShard, match=f"gRPC: {server.grpc_address}"):
        diloco_worker.join(server.http_address, tiny_model(), http=None, wait_s=30.0)


def test_joining_ends_with_a_cause_that_waiting_does_not_mend(shard, written):
    with pytest.raises(HandshakeFailed) as ended:
        diloco_worker.join(shard.address, tiny_model(), learner_id="a", wait_s=20)
    assert (ended.value.code, ended.value.exit_code) == ("TLS_MISMATCH", 5)
    assert "code=TLS_MISMATCH" in written.getvalue(), "it was said before it was believed"


def test_joining_waits_for_a_renewal(shard, run, train, written):
    folder = run.issue("learner/a", begins=timedelta(days=-3))
    with pytest.raises(CannotConnect):
        diloco_worker.join(shard.address, tiny_model(), learner_id="a", tls=folder, wait_s=3.0)
    assert "code=CERTIFICATE_NOT_VALID" in written.getvalue()

    run.issue("learner/a")
    train(shard.address, "a", tls=folder).step()

    assert shard.member_state("a") == "alive"


def test_an_observer_is_told_the_cause(serve, run):
    with pytest.raises(TlsMismatch):
        pull_global_model([serve().address], tls=run.issue("observer/x"), wait_s=4.0)


def test_the_cause_is_looked_for_at_the_first_failure_and_then_seldom(shard, loop, monkeypatch):
    looks: list[str] = []

    def look(address: str, *_: object) -> HandshakeFailed:
        looks.append(address)
        return TlsMismatch("so it is")

    monkeypatch.setattr("diloco_common.wire.grpc_transport.find_cause", look)

    async def dial_again_and_again() -> None:
        transport = GrpcTransport(shard.address, Credentials())
        for _ in range(20):
            with pytest.raises(TlsMismatch):
                await transport.join(Identity("local", "a"), JoinRequest(PROTOCOL, "p"), 5.0)
        await transport.close(0.0)

    loop.run(dial_again_and_again())
    assert looks == [shard.address]
