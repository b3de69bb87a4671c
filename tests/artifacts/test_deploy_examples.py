"""Examples for Slurm and systemd: their tools take them, and what they call is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509

from diloco_common.command import main
from diloco_common.settings import Settings
from diloco_common.trust.files import CA, CERTIFICATE, KEY, read_folder
from programs import need

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCRIPTS, UNITS = sorted((DEPLOY / "slurm").glob("*.sbatch")), sorted((DEPLOY / "systemd").glob("*.service"))
SHARDS, WORKERS = SCRIPTS
EXPOSURE_MAX = 2.0
"""What systemd calls OK; an ordinary service has 9 of 10."""


def run(*command: str | Path, **variables: str) -> str:
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=variables or None
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units, with a program that every machine has."""
    folder = tmp_path_factory.mktemp("units")
    for unit in UNITS:
        (folder / unit.name).write_text(re.sub(r"/opt/diloco/bin/\S+", "/bin/true", unit.read_text()))
    return folder


STANDS_FOR = {
    "scontrol": 'echo "scontrol $*"',
    "sleep": 'echo waits; mkdir -p "$RUN_DIR/run"; echo 2 >"$RUN_DIR/run/count"',
    "diloco": 'exec "$PYTHON" -m diloco_deploy "$@" >/dev/null',
    "srun": """
        [[ "$*" == *"--cpus-per-task=8 "* ]] || exit 1  # since 22.05, it does not take that over from sbatch
        while [[ $1 == --* ]]; do shift; done
        "$@"
        code=$(sed -n 1p "$RUN_DIR/codes") && sed -i 1d "$RUN_DIR/codes"
        [[ $code != cancelled ]] || { kill -TERM $PPID; code=143; }
        exit "${code:-0}" """,
    "diloco-server": 'printf "%s " "$@"; echo',
    "diloco-worker": """
        printf "%s " "$@"; echo
        [ -z "$STATE" ] || printf '{"state": "%s"}' "$STATE" >"${!#}" """,
}
"""Programs of a Slurm node, which tell what they were asked for."""


def slurm_node(folder: Path, codes: Sequence[object] = (), state: str = "") -> dict[str, str]:
    """The environment of a batch script on a node that has these programs, and a learner or shard that ends so."""
    programs = folder / "bin"
    programs.mkdir()
    for name, body in STANDS_FOR.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    run_folder = folder / "a run"
    run_folder.mkdir()
    (run_folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    path = f"{programs}:{os.environ['PATH']}"
    ours = {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "STATE": state}
    return {"PATH": path, "RUN_DIR": str(run_folder), "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "12", **ours}


def has_begun(node: dict[str, str], *, count: str | None) -> None:
    """The run of this node has an authority, and a file that says how many shards it has."""
    folder = Path(node["RUN_DIR"])
    assert main(["certs", "init", "--folder", str(folder / "certs")]) == 0
    if count is not None:
        (folder / "run").mkdir()
        (folder / "run/count").write_text(count)


def a_shard(index: int, node_name: str, node: dict[str, str]) -> list[str]:
    said = run(
        "bash", SHARDS, SLURM_ARRAY_TASK_ID=str(index), SLURM_ARRAY_TASK_COUNT="2", SLURMD_NODENAME=node_name, **node
    )
    return said.splitlines()


def test_slurm_starts_each_shard_with_its_index_and_workers_find_them_all(tmp_path: Path) -> None:
    node = slurm_node(tmp_path, state="done")
    folder, names = node["RUN_DIR"], ("node-7", "node-9")

    shards = [a_shard(i, name, node)[0] for i, name in enumerate(names)]
    assert [re.findall(r"--(?:index|count) (\d)", line) for line in shards] == [["0", "2"], ["1", "2"]]
    for i, (line, name) in enumerate(zip(shards, names, strict=True)):
        assert f"shard.data_dir={folder}/shard-{i} --address-file {folder}/run/shard-{i}.json" in line
        assert f"--listen {name}:0 " in line

    (worker,) = run("bash", WORKERS, SLURM_ARRAY_TASK_ID="5", **node).splitlines()
    assert worker.startswith(f"--shards @{folder}/run/shard-0.json,@{folder}/run/shard-1.json --learner-id worker-5 ")

    for said, who in [*zip(shards, ("shard/0", "shard/1"), strict=True), (worker, "learner/worker-5")]:
        own = re.findall(r"security\.tls=(.*?/certs/\S+)", said)[0]
        assert str(read_folder(Path(own), needs_pair=True).subject) == who
    for index, node_name in enumerate(names):
        certificate = read_folder(Path(folder) / f"certs/shard-{index}").certificate
        assert certificate is not None
        known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert node_name in known.get_values_for_type(x509.DNSName)


def test_a_run_keeps_the_number_of_shards_that_it_began_with(tmp_path: Path) -> None:
    node = slurm_node(tmp_path)
    a_shard(0, "node-7", node)
    alone = run("bash", SHARDS, SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_TASK_COUNT="1", SLURMD_NODENAME="node-9", **node)
    assert "--index 1 --count 2 " in alone


AGAIN, QUEUED = "waits", "scontrol requeue 12"


@pytest.mark.parametrize(
    ("codes", "state", "then"),
    [
        ([0], "done", []),  # the budget is merged
        ([0], "stopped", [QUEUED]),  # before the time limit, or preempted
        ([143], "", [QUEUED]),  # the same, while it was still starting
        ([1, 137, 0], "done", [AGAIN, AGAIN]),  # it died
        (["cancelled"], "stopped", []),
    ],
    ids=["done", "told to end", "told early", "died", "cancelled"],
)
def test_a_job_of_a_worker_goes_on_unless_it_is_done_or_cancelled(tmp_path, codes, state, then) -> None:
    node = slurm_node(tmp_path, codes, state)
    has_begun(node, count="2\n")
    said = run("bash", WORKERS, SLURM_ARRAY_TASK_ID="5", **node).splitlines()
    assert [line for line in said if not line.startswith("--shards")] == then


@pytest.mark.parametrize(
    ("codes", "then"),
    [([0], [QUEUED]), ([4, 139, 0], [AGAIN, AGAIN, QUEUED]), (["cancelled"], [])],
    ids=["told to end", "folder in use, then it died", "cancelled"],
)
def test_a_job_of_a_shard_goes_on_unless_it_is_cancelled(tmp_path: Path, codes: list[object], then: list[str]) -> None:
    said = a_shard(0, "node-7", slurm_node(tmp_path, codes))
    assert [line for line in said if not line.startswith("--index")] == then


@pytest.mark.parametrize(("script", "codes"), [(0, (3,)), (1, (6,))], ids=["shard", "worker"])
def test_what_somebody_has_to_look_at_is_not_tried_again(tmp_path: Path, script: int, codes: tuple[int, ...]) -> None:
    for code in codes:
        folder = tmp_path / str(code)
        folder.mkdir()
        node = slurm_node(folder, [code])
        has_begun(node, count="2\n")
        env = {**node, "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "2", "SLURMD_NODENAME": "node-7"}
        ended = subprocess.run(["bash", SCRIPTS[script]], env=env, capture_output=True, check=False)
        assert (ended.returncode, b"requeue" in ended.stdout) == (code, False)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_unit_and_a_service_is_exposed_to_little(units: Path, unit: Path) -> None:
    analyze = need("systemd-analyze", "Debian and Ubuntu: apt install systemd")
    assert run(analyze, "verify", "--man=no", unit.name.replace("@", "@0"), SYSTEMD_UNIT_PATH=f"{units}:") == ""
    said = run(analyze, "security", "--offline=yes", "--no-pager", units / unit.name, LC_ALL="C.UTF-8")
    exposure = re.search(r"Overall exposure level for .*: ([\d.]+)", said)
    assert exposure is not None
    assert float(exposure[1]) <= EXPOSURE_MAX
    for bound in (r"MemoryMax=\d+G", r"TasksMax=\d+", r"LimitNOFILE=\d+", "UMask=0077"):
        assert re.search(f"^{bound}$", unit.read_text(), re.MULTILINE), bound


@pytest.mark.parametrize("file", [*SCRIPTS, *UNITS], ids=lambda path: path.name)
def test_settings_and_flags_are_ours(file: Path) -> None:
    text = file.read_text()
    given = {*re.findall(r"--set (\w+\.\w+)=", text), *(
        variable.lower().replace("__", ".") for variable in re.findall(r"\bDILOCO_(\w+__\w+)=", text)
    )}  # fmt: skip
    settings = Settings()
    for name in given:
        section, key = name.split(".")
        assert hasattr(getattr(settings, section), key), name
    (program,) = set(re.findall(r"\bdiloco-(?:server|worker)\b(?= -)", text))
    module = {"diloco-server": "diloco_server", "diloco-worker": "diloco_demo"}[program]
    known = run(sys.executable, "-m", module, "--help", **os.environ)
    flags = set(re.findall(r"(?<=\s)--(listen|http|index|count|shards|learner-id)\b", text))
    assert flags
    assert all(f"--{flag} " in known for flag in flags)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_hands_over_the_files_of_a_certificate(unit: Path) -> None:
    text = unit.read_text()
    assert "DILOCO_SECURITY__TLS=%d" in text
    handed = dict(re.findall(r"^LoadCredential=([^:]+):(\S+)$", text, re.MULTILINE))
    (folder,) = {path.rpartition("/")[0] for path in handed.values()}
    assert handed == {name: f"{folder}/{name}" for name in (CA, CERTIFICATE, KEY)}
    assert folder == {"shard": "/etc/diloco/shard-%i", "worker": "/etc/diloco/learner-%i"}[unit.name.split("@")[0][7:]]
