"""`diloco certs tend`: who gets a certificate, when it is renewed, and what a learner cannot make it do."""

from __future__ import annotations

import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from diloco_common.errors import ConfigError
from diloco_common.trust.files import read_folder, read_revocations
from diloco_common.trust.identity import subject_of
from diloco_deploy.trust.authority import make_authority, open_authority
from diloco_deploy.trust.tending import Tending

NOW = datetime(2026, 11, 22, tzinfo=UTC)
NAMES = ("shard/0", "shard/1", "observer/page", "observer/prometheus")
SUBJECTS = [subject_of("compose", who) for who in NAMES]


@pytest.fixture
def tending(tmp_path: Path) -> Tending:
    make_authority(tmp_path / "ca", "compose", NOW)
    return Tending(open_authority(tmp_path / "ca"), tmp_path, SUBJECTS, ["ps.example"], 90.0, lent=SUBJECTS[-1:])


@pytest.fixture
def tended(tending: Tending) -> Tending:
    """Shards and observers have theirs."""
    tending.look(NOW)
    return tending


def learner_wishes(out: Path, learner_id: str) -> Path:
    folder = out / "learners" / f"learner-{learner_id}"
    folder.mkdir()
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_shards_and_observers_get_theirs_at_once_and_then_there_is_nothing_to_do(tending, tmp_path):
    assert [words.partition(",")[0] for words in tending.look(NOW)] == list(NAMES)
    assert tending.look(NOW + timedelta(days=1)) == []
    for who, folder in [
        ("shard/0", "shards/shard-0"),
        ("observer/page", "observers/observer-page"),
        ("observer/prometheus", "observers/observer-prometheus"),
    ]:
        assert str(read_folder_of(tmp_path / folder).subject) == who


def read_folder_of(folder: Path):
    (folder / "key.pem").chmod(0o600)
    return read_folder(folder, needs_pair=True)


def test_a_shard_is_known_by_the_name_of_its_folder_and_under_the_given_hosts(tended, tmp_path):
    certificate = read_folder(tmp_path / "shards/shard-1").certificate
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"shard-1", "ps.example", "localhost"} == set(names.get_values_for_type(x509.DNSName))


def test_keys_are_for_their_owner_and_one_that_is_lent_for_our_group(tending, tmp_path):
    learner_wishes(tmp_path, "a")
    tending.look(NOW)
    assert mode(tmp_path / "shards/shard-0/key.pem") == 0o600
    assert mode(tmp_path / "learners/learner-a/key.pem") == 0o600
    assert mode(tmp_path / "observers/observer-page/key.pem") == 0o600
    assert mode(tmp_path / "observers/observer-page") == 0o700
    assert mode(tmp_path / "observers/observer-prometheus/key.pem") == 0o640
    assert mode(tmp_path / "observers/observer-prometheus") == 0o750


@pytest.mark.parametrize("name", ["learner-", "learner-a b", "learner-" + "x" * 65, "shard-0", "learner-a\nb"])
def test_a_folder_that_names_no_learner_gets_nothing(tended, tmp_path, name):
    (tmp_path / "learners" / name).mkdir()
    assert tended.look(NOW) == []


def test_everything_is_renewed_when_a_third_of_its_time_is_left(tending, tmp_path):
    learner_wishes(tmp_path, "a")
    tending.look(NOW)
    assert tending.look(NOW + timedelta(days=59)) == []
    assert len(tending.look(NOW + timedelta(days=61))) == len(SUBJECTS) + 1
    ends = read_folder(tmp_path / "learners/learner-a").certificate.not_valid_after_utc
    assert ends == NOW + timedelta(days=151)


def test_whoever_is_revoked_gets_no_other_until_somebody_issues_one(tending, tmp_path):
    folder = learner_wishes(tmp_path, "a")
    tending.look(NOW)
    authority = open_authority(tmp_path / "ca")
    (one,), _ = authority.registry.revoke(subject_of("compose", "learner/a"), NOW)

    assert tending.look(NOW) == []
    assert not (folder / "ca.pem").exists(), "whoever starts there waits"
    assert tending.look(NOW + timedelta(days=80), renews=True)[-1].startswith("observer/"), "the others go on"
    assert [r.serial for r in read_revocations(tmp_path / "shards/revoked.json")] == [one.serial]

    authority.issue(subject_of("compose", "learner/a"), NOW, into=folder)
    tending.look(NOW)
    assert read_folder(folder).pair
    assert tending.look(NOW + timedelta(days=61))[-1].startswith("learner/a"), "it is looked after again"


def test_a_link_of_a_learner_is_not_followed(tended, tmp_path):
    """It could lead to the authority, or to a shard."""
    before = {path: path.read_bytes() for path in (tmp_path / "ca").iterdir()}
    (tmp_path / "learners/learner-a").symlink_to(tmp_path / "ca")
    inside = learner_wishes(tmp_path, "b")
    (inside / "cert.pem").symlink_to(tmp_path / "ca/ca.pem")
    tended.look(NOW)
    assert (tmp_path / "ca/ca.pem").read_bytes() == before[tmp_path / "ca/ca.pem"]
    assert not (tmp_path / "ca/cert.pem").exists()
    assert not (inside / "cert.pem").is_symlink()


def test_in_a_crowd_of_folders_those_that_are_known_are_served_and_new_ones_are_refused(tending, tmp_path, monkeypatch):
    known = [learner_wishes(tmp_path, name) for name in ("y", "z")]
    tending.look(NOW)
    monkeypatch.setattr("diloco_deploy.trust.tending.LEARNERS_MAX", 3)
    for i in range(4):
        learner_wishes(tmp_path, str(i))

    assert len(tending.look(NOW + timedelta(days=61))) == len(SUBJECTS) + len(known) + 1, "one of them has room"
    assert "more than 3 folders: new learners get no certificate" in tending.why_not
    for path in (tmp_path / "learners").glob("learner-[0-9]"):
        shutil.rmtree(path)
    tending.look(NOW + timedelta(days=61))
    assert not tending.why_not


def test_damaged_records_keep_nobody_from_being_revoked(tended, tmp_path):
    with (tmp_path / "ca/issued.jsonl").open("a") as file:
        file.write("{")
    open_authority(tmp_path / "ca").registry.revoke_serial("3aa6c68d58750627", NOW)
    with pytest.raises(ConfigError, match="a line is damaged"):
        tended.look(NOW)
    assert [one.serial for one in read_revocations(tmp_path / "shards/revoked.json")] == ["3aa6c68d58750627"]
