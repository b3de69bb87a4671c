"""The commands of docs/operations.md, run with stand-ins for the clusters that they talk to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diloco_common.settings_loader import load
from diloco_common.trust.files import read_folder, read_revocations
from manifests import ROOT, built, pods
from pages import followed
from programs import kubectl

PAGE = ROOT / "docs/operations.md"
BLOCKS = followed(PAGE)
STANDS_FOR = {
    "kubectl": """
        echo ---
        case "$*" in
          *create*) exec "$KUBECTL" "$@" --dry-run=client -o yaml ;;
          "apply -k "*) exec "$KUBECTL" kustomize "$3" ;;
        esac
        exit 1""",
    "sbatch": """
        [[ "${!#}" == deploy/slurm/*.sbatch && -f "${!#}" && "$*" == *--export=ALL,RUN_DIR=* ]] && echo "${!#}" """,
    "systemctl": """
        [ "$*" = daemon-reload ] && exit
        unit=${!#} && [ "$1 $2" = "enable --now" ] && ls "$ETC/systemd/system/${unit%@*}@.service" """,
    "diloco": "exit 127 # the page says that it is in /opt/diloco, which nobody has on the PATH",
    "opt-diloco": 'exec "$PYTHON" -m diloco_deploy "$@"',
}
"""What takes a cluster, or root: says what it was asked for, and fails on what the real one would."""


@pytest.fixture
def follow(tmp_path: Path):
    programs, etc = tmp_path / "bin", tmp_path / "etc"
    programs.mkdir()
    for name, body in STANDS_FOR.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "ETC": str(etc), "PYTHON": sys.executable}

    def run(name: str, **variables: str) -> str:
        commands = BLOCKS[name].replace("/etc/", f"{etc}/").replace("/opt/diloco/bin/", f"{programs}/opt-")
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def test_every_block_is_followed_below() -> None:
    assert list(BLOCKS) == [
        "kubernetes, with certificates", "kubernetes", "slurm", "systemd, the authority", "systemd, a shard",
        "systemd, a worker",
    ]  # fmt: skip


def test_pods_of_the_demo_find_the_namespace_and_the_token_that_were_made_before(follow) -> None:
    namespace, secret, *rest = [each for each in yaml.safe_load_all(follow("kubernetes", KUBECTL=kubectl())) if each]
    name = namespace["metadata"]["name"]
    assert rest == built("overlays/demo")
    assert secret["data"].keys() == {"token"}
    assert {each["metadata"].get("namespace", name) for each in [secret, *rest]} == {name}
    for pod in pods("overlays/demo"):
        mounted = {volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume}
        assert mounted == {secret["metadata"]["name"]}


def test_with_certificates_the_overlay_alone_is_applied(follow) -> None:
    applied = [each for each in yaml.safe_load_all(follow("kubernetes, with certificates", KUBECTL=kubectl())) if each]
    assert applied == built("overlays/mtls")


def test_slurm_gets_the_shards_and_the_workers(follow) -> None:
    assert follow("slurm").splitlines() == ["deploy/slurm/shards.sbatch", "deploy/slurm/workers.sbatch"]


def test_units_are_where_systemd_looks_and_what_they_read_is_valid(follow, tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    follow("systemd, the authority")
    assert "diloco-shard@.service" in follow("systemd, a shard")
    assert "diloco-worker@.service" in follow("systemd, a worker")
    for name in ("shard-0", "certs/shard-1", "certs/learner-paris-1"):
        assert str(read_folder(etc / "diloco" / name, needs_pair=True).subject) == name.rpartition("/")[2].replace(
            "-", "/", 1
        )
    assert read_revocations(etc / "diloco/revoked.json") == []
    said = dict(line.split("=") for file in etc.glob("diloco/*.env") for line in file.read_text().splitlines())
    settings = load(None, said).settings
    assert settings.shard.count == len(settings.worker.shards) == 2
