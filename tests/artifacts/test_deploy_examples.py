"""Examples for Slurm and systemd: their tools take them, and what they call is there."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from pathlib import Path

import pytest

from diloco_common.settings import Settings
from programs import need

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCRIPTS, UNITS = sorted((DEPLOY / "slurm").glob("*.sbatch")), sorted((DEPLOY / "systemd").glob("*.service"))
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_takes_the_script(script: Path) -> None:
    run("bash", "-n", script)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_reads_the_options_before_the_first_command(script: Path) -> None:
    lines = script.read_text().splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert lines[0] == "#!/bin/bash"
    assert options
    assert all(line.startswith("#") for line in lines[: options[-1]])


STANDS_FOR = {
    "scontrol": "printf 'node-%s\\n' 7 9",
    "squeue": '[ "$*" = "--noheader --states=RUNNING --jobs=$RUNNING" ] && echo running',
    "sleep": "echo waits; echo '12 node-7:50051,node-9:50051' >\"$RUN_DIR/shards\"",
    "diloco": '[ "$1" = token ] && echo secret >"$2"',
    "srun": """
        [[ "$*" == *"--cpus-per-task=8 "* ]] || exit 1  # since 22.05, it does not take that over from sbatch
        while [[ $1 == --* ]]; do shift; done
        for i in 0 1; do SLURM_PROCID=$i SLURM_NTASKS=2 "$@"; done""",
    "diloco-server": 'printf "%s " "$@"; echo',
    "diloco-worker": 'printf "%s " "$@"; echo',
}
"""Programs of a Slurm node, which tell what they were asked for."""


def slurm_node(folder: Path) -> dict[str, str]:
    """The environment of a batch script on a node that has these programs."""
    programs = folder / "bin"
    programs.mkdir()
    for name, body in STANDS_FOR.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return {"PATH": path, "RUN_DIR": str(folder / "a run"), "SLURM_CPUS_PER_TASK": "8"}


def test_slurm_starts_each_shard_with_its_index_and_workers_find_them_all(tmp_path: Path) -> None:
    node = slurm_node(tmp_path)
    folder = node["RUN_DIR"]

    shards = run("bash", SCRIPTS[0], SLURM_JOB_ID="12", SLURM_JOB_NODELIST="node-[7,9]", **node).splitlines()
    assert [re.findall(r"--(?:index|count) (\d)", line) for line in shards] == [["0", "2"], ["1", "2"]]
    assert [f"shard.data_dir={folder}/shard-{i}" in line for i, line in enumerate(shards)] == [True, True]

    worker = run("bash", SCRIPTS[1], SLURM_ARRAY_TASK_ID="5", RUNNING="12", **node)
    assert worker.startswith("--shards node-7:50051,node-9:50051 --learner-id worker-5 ")


@pytest.mark.parametrize("left_behind", ["11 node-3:50051", None], ids=["by an earlier job", "by none"])
def test_a_worker_waits_for_the_shards_of_a_job_that_runs(tmp_path: Path, left_behind: str | None) -> None:
    node = slurm_node(tmp_path)
    Path(node["RUN_DIR"]).mkdir()
    if left_behind:
        (Path(node["RUN_DIR"]) / "shards").write_text(left_behind + "\n")
    worker = run("bash", SCRIPTS[1], SLURM_ARRAY_TASK_ID="5", RUNNING="12", **node)
    assert worker.startswith("waits\n--shards node-7:50051,node-9:50051 ")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_unit(units: Path, unit: Path) -> None:
    analyze = need("systemd-analyze", "Debian and Ubuntu: apt install systemd")
    said = run(analyze, "verify", "--man=no", unit.name.replace("@", "@0"), SYSTEMD_UNIT_PATH=f"{units}:")
    assert said == ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_service_is_exposed_to_little(units: Path, unit: Path) -> None:
    analyze = need("systemd-analyze", "Debian and Ubuntu: apt install systemd")
    said = run(analyze, "security", "--offline=yes", "--no-pager", units / unit.name, LC_ALL="C.UTF-8")
    exposure = re.search(r"Overall exposure level for .*: ([\d.]+)", said)
    assert exposure is not None
    assert float(exposure[1]) <= EXPOSURE_MAX


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
    side = {"diloco-server": "server/diloco_server", "diloco-worker": "worker/diloco_worker"}[program]
    source = (DEPLOY.parent / side / "cli.py").read_text()
    flags = set(re.findall(r"(?<=\s)--(listen|http|index|count|shards|learner-id)\b", text))
    assert flags
    assert all(f'"--{flag}"' in source for flag in flags)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_two_instances_on_a_host_can_have_ports_of_their_own(unit: Path) -> None:
    kind, text = unit.name.removeprefix("diloco-").removesuffix("@.service"), unit.read_text()
    assert not re.search(r"^ExecStart=.*--(?:http|listen)", text, re.MULTILINE), "a flag would win over their file"
    files = re.findall(r"^EnvironmentFile=(.*)", text, re.MULTILINE)
    assert files == [f"/etc/diloco/{kind}.env", f"-/etc/diloco/{kind}-%i.env"]


@pytest.mark.parametrize("device", ["nvidia-frontend", "nvidia", "nvidiactl", "nvidia-uvm"])
def test_a_worker_may_use_the_devices_of_every_driver(device: str) -> None:
    allowed = re.findall(r"^DeviceAllow=char-(\S+) rw$", UNITS[1].read_text(), re.MULTILINE)
    assert any(fnmatch.fnmatch(device, pattern) for pattern in allowed)
