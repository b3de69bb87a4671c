"""A real Slurm on machines of this one: munged, slurmctld, and a slurmd on each node. Needs root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from machines import Machines

import waiting

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
CONTROLLER = "ctl"
DEADLINE_S = 120.0
_CONF = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory,CR_LLN
SlurmdParameters=config_overrides
SlurmctldParameters=enable_configless
SlurmdTimeout=5
KillWait=10
JobRequeue=1
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MailProg=/bin/true
NodeName={nodes} CPUs=16 RealMemory=65536 State=UNKNOWN
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


class Slurm:
    """A context manager; the nodes are idle once it is entered."""

    def __init__(self, nodes: Sequence[str], folder: Path) -> None:
        self.nodes = nodes
        self._folder = folder
        self._machines = Machines([CONTROLLER, *nodes], folder)
        self._conf = folder / "slurm.conf"
        self._munged: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._machines.__enter__()
        try:
            self._configure()
            self._start_munged()
            self._machines.start(CONTROLLER, "slurmctld", "-D", "-f", self._conf, env=self._environment())
            for node in self.nodes:
                self.boot(node)
            waiting.until(
                lambda: self._ask("sinfo", "-h", "-o", "%T").split() == ["idle"], "idle nodes", DEADLINE_S, 0.2
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._machines.__exit__(*error)
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()

    def boot(self, node: str) -> None:
        """Start a node that is new or dead."""
        self._machines.start(node, "slurmd", "-D", "-N", node, "-f", self._conf, env=self._environment())

    def kill(self, node: str) -> None:
        """A node loses power."""
        self._machines.kill(node)

    def sbatch(self, *arguments: str | Path, env: Mapping[str, str]) -> str:
        """Submit, as a person would type it. Returns the job's id."""
        said = self._run("sbatch", *arguments, env=env)
        (job,) = re.findall(r"^Submitted batch job (\d+)$", said, re.MULTILINE)
        return str(job)

    def control(self, *arguments: str) -> str:
        return self._run("scontrol", *arguments)

    def show(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, such as 12 or 12_0."""
        return dict(re.findall(r"(\w+)=(\S*)", self._run("scontrol", "-o", "show", "job", job)))

    def cancel(self, job: str) -> None:
        self._run("scancel", job)

    def is_active(self, job: str) -> bool:
        """Whether any task of it runs, ends or waits."""
        return bool(self._run("squeue", "--noheader", "--jobs", job).strip())

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))

    def _configure(self) -> None:
        self._conf.write_text(
            _CONF.format(
                controller=CONTROLLER, address=self._machines.addresses[CONTROLLER], folder=self._folder,
                nodes=",".join(self.nodes),
            )
        )  # fmt: skip
        (self._folder / "state").mkdir()
        for node in self.nodes:
            (self._folder / f"spool-{node}").mkdir()

    def _start_munged(self) -> None:
        """It wants a user of its own, and folders that nobody else writes."""
        folder = self._folder / "munge"
        folder.mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        for path in (folder, folder / "key"):
            shutil.chown(path, "munge", "munge")
        folder.chmod(0o755)
        command = [
            "munged", "--foreground", f"--key-file={folder}/key", f"--socket={folder}/socket",
            f"--pid-file={folder}/pid", f"--log-file={folder}/log", f"--seed-file={folder}/seed",
        ]  # fmt: skip
        self._munged = subprocess.Popen(
            ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", *command],
            stdout=subprocess.DEVNULL, stderr=(self._folder / "munged.log").open("ab"),
        )  # fmt: skip
        waiting.until(lambda: (folder / "socket").exists(), "munged")

    def _ask(self, *command: str) -> str:
        try:
            return self._run(*command)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return ""  # not up yet

    def _run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a client on the controller. One against nodes that are not ready would wait for ever."""
        ended = subprocess.run(
            self._machines.command(CONTROLLER, *command),
            env={**self._environment(), **(env or {})}, timeout=60, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return ended.stdout

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self._conf), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
