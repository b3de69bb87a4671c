"""Checkpoints in an object store: file:// and s3://, the latter against moto's server."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from diloco_common.command import main
from diloco_deploy.checkpoint import sources
from diloco_server.storage.checkpoint import MANIFEST
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.folders import is_checkpoint
from stores import MANIFEST as MODEL
from stores import make_version, open_store

BUCKET = "versions"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 server of this process, with one bucket; its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"), timeout=120).close()
    yield address
    server.stop()


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where nothing is yet. Credentials come from the environment, as they would to a person."""
    if request.param == "file":
        return f"file://{tmp_path}/objects"
    sign_in(request.getfixturevalue("s3"), monkeypatch)
    return f"s3://{BUCKET}/{tmp_path.name}/one"


def sign_in(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in {
        "ENDPOINT_URL": address, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    store = open_store(Disk(tmp_path / "shard-0"))
    store.recover()
    for fragment_id in (0, 1):
        store.save(make_version(7, fragment_id=fragment_id, sends_changes=True), MODEL)
    assert main(["checkpoint", str(tmp_path / "shard-0"), "--name", "one"]) == 0
    return tmp_path / "shard-0" / "checkpoints" / "one"


def read(name: str, out: Path) -> bytes:
    assert main(["export", name, "--out", str(out)]) == 0
    return out.read_bytes()


def test_a_copy_is_verified_restored_and_exported_from_its_url(url, checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)  # several blocks to a file
    assert main(["checkpoint", "copy", str(checkpoint), url]) == 0

    copied = sources.ObjectFolder(url)
    assert copied.names() == sorted(path.name for path in checkpoint.iterdir())
    for path in checkpoint.iterdir():
        opened = copied.open(path.name)
        found = bytearray(opened.size)
        assert opened.read_into(memoryview(found), 0) == len(found)
        assert found == path.read_bytes()
    assert main(["checkpoint", "verify", url]) == 0
    new = tmp_path / "new"
    assert main(["restore", url, "--shards", "2", "--folder", str(new)]) == 0
    exported = [read(name, tmp_path / "m.safetensors") for name in (str(checkpoint), url, str(new))]
    assert exported[0] == exported[1] == exported[2]


def test_a_copy_that_was_interrupted_is_no_checkpoint_and_is_begun_again(url, checkpoint, capsys, monkeypatch) -> None:
    """The manifest comes last: everything before it may be there."""

    def cut(self: object, name: str, content: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources.ObjectFolder, "put_new", cut)
        assert main(["checkpoint", "copy", str(checkpoint), url]) == 130
    assert main(["checkpoint", "verify", url]) == 3
    assert "BAD_CHECKPOINT" in capsys.readouterr().err
    assert main(["checkpoint", "copy", str(checkpoint), url]) == 0
    assert main(["checkpoint", "verify", url]) == 0


def test_damage_is_found_at_a_url_and_never_copied(url, checkpoint, capsys) -> None:
    assert main(["checkpoint", "copy", str(checkpoint), url]) == 0
    path = sorted(checkpoint.glob("fragment-*"))[0]
    content = bytearray(path.read_bytes())
    content[-1000] ^= 2
    sources.ObjectFolder(url).put(path.name, iter([bytes(content)]))
    assert main(["checkpoint", "verify", url]) == 3
    assert path.name in capsys.readouterr().err

    path.unlink()
    path.write_bytes(content)
    assert main(["checkpoint", "copy", str(checkpoint), f"{url}-2"]) == 3
    assert path.name in capsys.readouterr().err
    assert MANIFEST not in sources.ObjectFolder(f"{url}-2").names()
    assert is_checkpoint(checkpoint)


def test_a_store_that_does_not_answer_or_has_no_such_bucket_is_told(
    checkpoint: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sign_in(s3, monkeypatch)
    assert main(["checkpoint", "copy", str(checkpoint), "s3://nobody/here"]) == 5
    said = capsys.readouterr().err
    assert said.endswith("[CANNOT_CONNECT]\n")
    assert said.count("\n") == 1
