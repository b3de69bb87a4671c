"""`diloco up` on addresses that other machines reach: an authority of its own, and a certificate for each process."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from diloco_common.errors import ConfigError
from diloco_common.settings import Settings
from diloco_common.settings_loader import load
from diloco_common.trust.files import read_folder, read_revocations
from diloco_common.trust.identity import subject_of
from diloco_deploy.run.folder import ClusterFolder, Outputs
from diloco_deploy.run.members import Children, Programs
from diloco_deploy.trust.authority import open_authority
from diloco_deploy.trust.tending import RENEW_EVERY_S, OwnCertificates, own_certificates


def settings_with(*overrides: str) -> Settings:
    return load(None, {}, ["cluster.shards=2", "cluster.workers=2", *overrides]).settings


@pytest.mark.parametrize(
    ("overrides", "are_made"),
    [
        ((), False),
        (("shard.listen=[::1]:0",), False),
        (("shard.listen=0.0.0.0:0",), True),
        (("shard.http=10.1.2.3:8080",), True),
        (("worker.http=0.0.0.0:0",), True),
        (("shard.listen=0.0.0.0:0", "security.insecure=true"), False),
    ],
)
def test_they_are_made_where_other_machines_can_reach_a_process(tmp_path, overrides, are_made):
    assert (own_certificates(settings_with(*overrides), tmp_path / "certs") is not None) is are_made
    assert (tmp_path / "certs").exists() is are_made


def test_every_child_is_given_its_own(tmp_path):
    settings = settings_with("shard.listen=0.0.0.0:0", "run.id=wide")
    files = ClusterFolder(tmp_path, Outputs())
    certificates = own_certificates(settings, files.certs)
    children = Children(settings, files, Programs(), certificates)
    children._ports = dict.fromkeys(children.shards, ("0.0.0.0:1", "0.0.0.0:2"))

    given = {}
    for child in (children.shard(0), children.shard(1), children.worker(0), children.worker(1), children.evaluation()):
        sets = dict(
            word.removeprefix("--set=").split("=", 1) for word in child.arguments() if word.startswith("--set=")
        )
        given[child.name] = str(read_folder(Path(sets["security.tls"]), needs_pair=True).subject)
        assert read_revocations(Path(sets["security.revoked"])) == []

    assert given == {
        "shard-0": "shard/0", "shard-1": "shard/1", "worker-0": "learner/worker-0", "worker-1": "learner/worker-1",
        "evaluate": "observer/up",
    }  # fmt: skip


def test_a_run_that_goes_on_keeps_them_and_what_is_old_is_renewed(tmp_path):
    made = OwnCertificates(tmp_path, "local", 1, ["worker-0"], ["ps-0"])
    made.renew(0.0)
    before = read_folder(made.of("shard/0")).pair
    again = OwnCertificates(tmp_path, "local", 1, ["worker-0"], ["ps-0"])
    again.renew(0.0)
    assert read_folder(again.of("shard/0")).pair == before

    (again.of("shard/0") / "cert.pem").unlink()
    again.renew(RENEW_EVERY_S - 1)
    assert not (again.of("shard/0") / "cert.pem").exists(), "it looks once an hour"
    again.renew(RENEW_EVERY_S)
    assert read_folder(again.of("shard/0")).pair is not None


def test_a_worker_that_was_revoked_gets_no_other(tmp_path):
    made = OwnCertificates(tmp_path, "local", 1, ["worker-0"], ["ps-0"])
    made.renew(0.0)
    authority = open_authority(tmp_path)
    made_before = len(authority.registry.issued())
    authority.registry.revoke(subject_of("local", "learner/worker-0"), datetime.now(UTC))
    made.renew(RENEW_EVERY_S)
    assert len(authority.registry.issued()) == made_before


def test_the_certificate_of_one_process_is_refused_for_all(tmp_path):
    with pytest.raises(ConfigError, match="each process of `diloco up` needs its own"):
        own_certificates(settings_with(f"security.tls={tmp_path}"), tmp_path / "certs")
