"""A secret that others can read, or could have written, is refused with the command that mends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco_common.errors import SecretExposed
from diloco_common.settings import SecuritySettings
from diloco_common.trust.files import exposure, read_bearer_token, read_private
from secret_files import secret_file

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
