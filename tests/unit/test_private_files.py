"""What we write is for its owner alone, and a secret that others can read is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diloco_common.errors import SecretExposed
from diloco_common.settings import SecuritySettings
from diloco_common.trust.files import exposure, read_bearer_token, read_private
from diloco_demo.checkpoint import save_checkpoint
from diloco_deploy.checkpoint.folders import take_checkpoint
from diloco_server.storage import folders
from diloco_server.storage.filesystem import Disk, FolderLock
from diloco_worker.global_model import write_model
from secret_files import secret_file
from stores import MANIFEST, make_version, open_store


@pytest.fixture(params=[0o000, 0o077], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def everything_in(folder: Path) -> dict[str, int]:
    """Mode of each file and folder, this one included."""
    return {str(path.relative_to(folder)): mode(path) for path in (folder, *folder.rglob("*"))}


def fill(folder: Path) -> None:
    """A data folder with versions of the whole model, and a shard that holds it."""
    store = open_store(Disk(folder))
    store.recover()
    lock = FolderLock(folder)
    for fragment_id in (0, 1):
        store.save(make_version(0, fragment_id=fragment_id), MANIFEST)
    lock.release()


@pytest.mark.usefixtures("umask")
def test_a_data_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    fill(tmp_path / "new/shard-0")
    found = everything_in(tmp_path / "new")
    assert {found.pop("."), found.pop("shard-0")} == {0o700}
    assert len(found) >= 4
    assert set(found.values()) == {0o600}, found


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("hard_links", [True, False], ids=["linked", "copied"])
def test_a_checkpoint_is_for_its_owner_alone(tmp_path: Path, hard_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "shard-0")
    if not hard_links:

        def no_link(_: Path, target: Path) -> None:
            raise OSError(folders.errno.EXDEV, "another disk", target)

        monkeypatch.setattr(folders.os, "link", no_link)
    take_checkpoint([tmp_path / "shard-0"], tmp_path / "checkpoints/c", whole=True)
    found = everything_in(tmp_path / "checkpoints")
    assert {found.pop("."), found.pop("c")} == {0o700}
    assert set(found.values()) == {0o600}, found


@pytest.mark.usefixtures("umask")
def test_a_file_that_others_could_read_is_closed_to_them_when_it_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"of an earlier release")
    (tmp_path / "old").chmod(0o644)
    Disk(tmp_path).create("old").close()
    assert mode(tmp_path / "old") == 0o600


def test_a_folder_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)  # a volume of Kubernetes belongs to root, and we are in its group
    Disk(tmp_path)
    assert mode(tmp_path) == 0o770


@pytest.mark.usefixtures("umask")
def test_a_checkpoint_of_a_learner_is_for_its_owner_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = tmp_path / "checkpoint"
    save_checkpoint(path, model, torch.optim.AdamW(model.parameters()), {"run": "run"}, 0)
    assert mode(path) == 0o600


def test_an_exported_model_is_as_the_umask_says(tmp_path: Path, umask: int) -> None:
    write_model(tmp_path / "model.safetensors", {"weight": torch.zeros(3)})
    assert mode(tmp_path / "model.safetensors") == 0o666 & ~umask


ROOT, US, OTHER = 0, 1000, 1001
"""Users, and groups of the same numbers."""


@pytest.mark.parametrize(
    ("mode", "owner", "group", "exposed"),
    [
        (0o600, US, US, None),
        (0o400, US, OTHER, None),
        (0o600, ROOT, ROOT, None),
        (0o640, US, US, "group 1000 can read it"),  # a group of many, on many clusters
        (0o644, US, US, "everybody"),
        (0o620, US, US, "group 1000 can change it"),
        (0o600, OTHER, US, "belongs to user 1001"),
        # Kubernetes: root's, lent to our group by fsGroup. Links to it are followed.
        (0o440, ROOT, US, None),
        (0o640, ROOT, US, None),
        (0o440, ROOT, OTHER, "group 1001 can read it"),
        (0o444, ROOT, US, "everybody"),
        (0o660, ROOT, US, "group 1000 can change it"),
        # systemd: root's, with an access list that names us; its mask is what shows as the bits of the group.
        (0o440, ROOT, ROOT, None),
    ],
)
def test_a_secret_is_for_its_owner_alone_or_lent_by_root(mode: int, owner: int, group: int, exposed: str | None):
    found = exposure(0o100000 | mode, owner, group, user=US, groups={US})
    assert (exposed is None) == (found is None), found
    assert (exposed or "") in (found or "")


def test_a_secret_that_others_can_read_is_refused_and_the_command_that_is_named_mends_it(tmp_path: Path) -> None:
    token = secret_file(tmp_path / "token", "a-token-of-this-run")
    token.chmod(0o644)
    with pytest.raises(SecretExposed) as refused:
        read_bearer_token(SecuritySettings(token_file=token))
    message = str(refused.value)
    assert "(mode 0644)" in message
    assert "a-token-of-this-run" not in message
    assert message.endswith(f": chmod 600 {token}")
    assert (refused.value.code, refused.value.exit_code) == ("SECRET_EXPOSED", 2)

    token.chmod(0o600)
    assert read_bearer_token(SecuritySettings(token_file=token)) == "a-token-of-this-run"


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    key, link = secret_file(tmp_path / "key", "a key"), tmp_path / "link"
    link.symlink_to(key)
    assert read_private(link) == b"a key"
    key.chmod(0o644)
    with pytest.raises(SecretExposed, match="everybody"):
        read_private(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    token = secret_file(tmp_path / "token", "a-token-of-this-run")
    os.chown(token, 12345, 12345)
    with pytest.raises(SecretExposed, match=f"belongs to user 12345 .* chown 0 {token} && chmod 600"):
        read_private(token)
