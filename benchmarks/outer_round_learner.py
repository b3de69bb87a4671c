"""One learner process of outer_round.py. Its model does not train. It obeys these commands from a pipe:

"round"  change the parameters, say "ready"; at "go" take an inner step, and take part until every fragment has its next
         version; say "done"
"gloo"   say "ready"; at "go" all-reduce as many float32 with Gloo; say "done"
"usage"  also before "go": say CPU seconds, memory, CPU seconds by phase, bytes in both directions
"end"    leave
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import diloco_worker
from diloco_common.allocator import tune_allocator
from diloco_common.manifest import TensorSpec

STEP_TOKENS = 1000
CHANGE = 1e-3
ROUND_S = 300.0
POLL_S = 0.2
"""`poll` returns sooner where something arrives."""


@dataclass(frozen=True)
class LearnerSpec:
    """The settings of a learner process."""

    rank: int
    learners: int
    shards: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    gloo_address: str
    """host:port of Gloo's rendezvous; empty: no all-reduce."""
    tls: Path | None = None
    """Folder of its certificate; None: plaintext."""


class Weights(nn.Module):
    """Parameters with given names and shapes, and nothing else."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for spec in tensors:
            self.register_parameter(spec.name.replace(".", "_"), nn.Parameter(torch.empty(spec.shape).normal_(0, 0.02)))


def run_learner(spec: LearnerSpec, pipe: Connection) -> None:
    """The process. It ends at "end", or with its parent."""
    tune_allocator()
    torch.set_num_threads(1)
    model = Weights(spec.tensors)
    mean_merge = {t.name.replace(".", "_") for t in spec.tensors if t.rule == "mean"}
    reduced = torch.ones(sum(t.num_elements for t in spec.tensors)) if spec.gloo_address else None
    if reduced is not None:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{spec.gloo_address}", rank=spec.rank, world_size=spec.learners
        )
        dist.all_reduce(reduced)  # its buffers are not ours
    memory = OwnMemory()
    learner = diloco_worker.join(
        spec.shards, model, learner_id=f"learner-{spec.rank}", tls=spec.tls, mean_merge=mean_merge, wait_s=ROUND_S,
        island="alone",  # the process group is for all-reduce, beside which a round is measured
    )  # fmt: skip
    with learner:
        pipe.send("joined")
        noise = torch.Generator().manual_seed(spec.rank)
        while (command := pipe.recv()) != "end":
            if command == "usage":
                pipe.send(usage(learner) | {"own_bytes": memory.most})
                continue
            if command == "round":
                change(model, noise)
            pipe.send("ready")
            while pipe.recv() != "go":
                pipe.send(usage(learner))
            memory.begin()
            if command == "round":
                take_round(learner)
                memory.end()
            elif reduced is not None:
                dist.all_reduce(reduced)
                reduced.div_(spec.learners)
            pipe.send("done")


class OwnMemory:
    """The most that the process holds in some spans of time, beyond what it held before: model, benchmark, all else."""

    def __init__(self) -> None:
        self._before = self._rss("VmRSS")
        self.most = 0

    def begin(self) -> None:
        """From here on."""
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    def end(self) -> None:
        """Up to here."""
        self.most = max(self.most, self._rss("VmHWM") - self._before)

    @staticmethod
    def _rss(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(field + ":")[1].split()[0]) * 1024


@torch.no_grad()
def change(model: Weights, noise: torch.Generator) -> None:
    """Stand in for training: move every parameter a little, differently for each learner."""
    for parameter in model.parameters():
        flat = parameter.view(-1)
        pattern = torch.randn(min(flat.numel(), 1 << 16), generator=noise).mul_(CHANGE)
        for start in range(0, flat.numel(), pattern.numel()):
            part = flat[start : start + pattern.numel()]
            part.add_(pattern[: part.numel()])


def take_round(learner: diloco_worker.Learner) -> None:
    """Take the one inner step of a round, then take part until every fragment has its next version."""
    assert learner.core is not None
    fragments = learner.core.fragments.values()
    target = 1 + min(f.version for f in fragments)
    learner.step(STEP_TOKENS)
    deadline = time.monotonic() + ROUND_S
    while any(f.version < target for f in fragments):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no version {target} of every fragment within {ROUND_S:.0f} s")
        learner.poll(POLL_S)


def usage(learner: diloco_worker.Learner) -> dict[str, Any]:
    """CPU, memory and bytes since the process began."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    phases = {
        sample.labels["phase"]: sample.value
        for family in learner.telemetry.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "diloco_worker_sync_seconds_total"
    }
    return {
        "cpu_s": own.ru_utime + own.ru_stime,
        "rss_bytes": own.ru_maxrss * 1024,
        "phases_cpu_s": phases,
        "bytes_up": learner.telemetry.bytes_pushed,
        "bytes_down": learner.telemetry.bytes_pulled,
    }
