"""The cost of a shard as learners, fragments and parameters grow, the law behind it, and the effect of more shards.

    python benchmarks/growth.py                                # all sweeps: about eight minutes
    python benchmarks/growth.py --only learners,fragments --json growth.json
    python benchmarks/growth.py --draw growth.json             # docs/growth.png again, without measuring

Shards are real processes. Learners are light ones (light_learners.py) in this process. In a round, every learner
reports H inner steps, so all fragments are due. All learners contribute int8 to all fragments, and pull every version
as bfloat16. The kernel (/proc/PID) gives the CPU seconds and memory of a shard. Then, over all cases, by least squares:

    CPU seconds = a per version + b per contribution + c per million parameters + d per MB received or sent
    memory      = idle shard + contributions of open rounds
                  + bytes per parameter + bytes per parameter of one fragment + bytes per learner + a constant

The law says what one core serves: so many contributions per second where they are small, so many bytes where they are
large. `cores` is how busy the busiest shard was: its event loop is one thread, so near 1 it is saturated.

Exits with 1 if a shard of a large model took more than 11 bytes per parameter, not counting its idle memory and the
contributions. Needs Linux, and about 3 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import growth_plot
from diloco_common.manifest import Manifest, cut
from growth_law import CpuLaw, MemoryLaw, fit_cpu, fit_memory
from light_learners import Accepted, LightLearner, ShardProcess, noise_of, running_shard, tensors_of

BYTES_PER_PARAMETER_MAX = 11.0
LARGE = 50_000_000
"""Models with fewer parameters are not checked: in them, libraries and connections take more memory."""
DOCS = Path(__file__).resolve().parent.parent / "docs"
SYNC_EVERY = 24
REPORTS = 20
"""Reports of each learner, to measure the cost of one."""
SETTLE_S, SETTLES_MAX = 0.25, 20
"""Interval and number of looks at the shards, until they have read all reports."""


@dataclass(frozen=True)
class Case:
    learners: int
    fragments: int
    parameters: int
    shards: int = 1


@dataclass(frozen=True)
class Cost:
    """The costs of the shards of one case: means over the measured rounds. A round covers all fragments."""

    sweep: str
    learners: int
    fragments: int
    parameters: int
    shards: int
    seconds: float
    """Seconds of a round, with the learners' own work on the same cores."""
    shard_cpu_s: list[float]
    """CPU seconds of each shard in a round."""
    client_cpu_s: float
    """CPU seconds of all learners together in a round."""
    moved_bytes: float
    """Bytes received and sent by all shards in a round."""
    idle_bytes: list[int]
    """Resident memory of each shard before anybody joined."""
    peak_bytes: list[int]
    """Peak resident memory of each shard (VmHWM)."""
    open_bytes: list[int]
    """Peak bytes of accepted, unmerged contributions, per shard."""
    busy: int
    """Pushes that were answered BUSY and repeated."""
    report_cpu_s: float
    """CPU seconds of all shards for one report of an inner step."""

    @property
    def contributions(self) -> int:
        """Contributions of one round."""
        return self.learners * self.fragments

    @property
    def contributions_per_core_s(self) -> float:
        """Contributions, each with its pull, that one core serves in a second: by the CPU time of all shards."""
        return self.contributions / sum(self.shard_cpu_s)

    @property
    def bytes_per_core_s(self) -> float:
        """Bytes received and sent that one core serves in a second."""
        return self.moved_bytes / sum(self.shard_cpu_s)

    @property
    def cores(self) -> float:
        """Cores that the busiest shard kept busy during the rounds: near 1, it is what the others wait for."""
        return max(self.shard_cpu_s) / self.seconds

    @property
    def own_bytes(self) -> int:
        """Peak memory of the first shard, without its idle memory and the contributions."""
        return self.peak_bytes[0] - self.idle_bytes[0] - self.open_bytes[0]


# "mixed" varies several numbers at once, so the law can tell bytes from contributions and from parameters.
SWEEPS = {
    "learners": [Case(n, 8, 1_000_000) for n in (1, 4, 8, 16, 32, 64, 128, 256)],
    "fragments": [Case(4, n, 8_000_000) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)],
    "parameters": [Case(4, 24, int(n * 1e6)) for n in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)],
    "shards": [Case(n, 8, 1_000_000, shards) for n in (16, 64, 256) for shards in (2, 4, 8)],
    "bytes": [Case(n, 8, 8_000_000) for n in (8, 32, 64)],
    "mixed": [Case(32, 8, 4_000_000), Case(16, 8, 8_000_000), Case(2, 128, 16_000_000), Case(1, 8, 32_000_000)],
}


async def measure(sweep: str, case: Case, rounds: int, at_least_s: float) -> Cost:
    """Run one case: start its shards and learners, warm up for one round, measure `rounds` or more, then reports."""
    manifest = cut(tensors_of(case.parameters), case.fragments, case.shards)
    with ExitStack() as stack:
        shards = [
            stack.enter_context(
                running_shard(
                    f"sync.fragments={case.fragments}", f"sync.sync_every={SYNC_EVERY}", "sync.quorum=all",
                    f"shard.index={index}", f"shard.count={case.shards}", f"shard.max_pushes={4 * case.learners + 64}",
                    "lease.lease_s=300", "lease.heartbeat_s=1",
                )
            )
            for index in range(case.shards)
        ]  # fmt: skip
        idle = [shard.rss_bytes() for shard in shards]
        load = _Load(case.learners, manifest, shards)
        await load.begin()
        before, done = load.used(), 0
        while done < rounds or load.used().seconds - before.seconds < at_least_s:
            await load.round()
            done += 1
        used = load.used()
        report_cpu_s = await load.reports()
        await load.end()
        return Cost(
            sweep=sweep, learners=case.learners, fragments=len(manifest.fragments), parameters=manifest.num_elements,
            shards=case.shards, seconds=(used.seconds - before.seconds) / done,
            shard_cpu_s=[(b - a) / done for a, b in zip(before.shard_cpu_s, used.shard_cpu_s, strict=True)],
            client_cpu_s=(used.client_cpu_s - before.client_cpu_s) / done,
            moved_bytes=(used.moved_bytes - before.moved_bytes) / done,
            idle_bytes=idle, peak_bytes=[shard.rss_bytes("VmHWM") for shard in shards],
            open_bytes=[accepted.most for accepted in load.accepted], busy=load.busy, report_cpu_s=report_cpu_s,
        )  # fmt: skip


@dataclass(frozen=True)
class _Used:
    """Totals since the beginning."""

    seconds: float
    shard_cpu_s: list[float]
    client_cpu_s: float
    moved_bytes: int


def _cpu_rate(a: _Used, b: _Used) -> float:
    """CPU seconds per second of all shards together."""
    return (sum(b.shard_cpu_s) - sum(a.shard_cpu_s)) / (b.seconds - a.seconds)


class _Load:
    """All learners of one case. For several shards, a learner is one light learner per shard."""

    def __init__(self, learners: int, manifest: Manifest, shards: Sequence[ShardProcess]) -> None:
        self.accepted = [Accepted() for _ in shards]
        contributions = noise_of(manifest.fragments, 0.001, "int8")
        self._learners = [
            LightLearner(f"learner-{i}", shard, manifest, manifest.owned_by(index), contributions, self.accepted[index])
            for i in range(learners)
            for index, shard in enumerate(shards)
        ]
        self._shards = shards
        self._version = 0

    @property
    def busy(self) -> int:
        return sum(learner.busy for learner in self._learners)

    def used(self) -> _Used:
        moved = sum(learner.bytes_pushed + learner.bytes_pulled for learner in self._learners)
        return _Used(time.monotonic(), [shard.cpu_s() for shard in self._shards], time.process_time(), moved)

    async def begin(self) -> None:
        """Join, seed, and take the first round, which is not measured."""
        for learner in self._learners:
            await learner.join()
        for learner in self._learners[: len(self._shards)]:
            for fragment in learner.fragments:  # one after the other, to save memory in this process
                await learner.seed(noise_of([fragment], 0.02, "float32"))
        await asyncio.gather(*(learner.pulled(0) for learner in self._learners))
        await self.round()

    async def round(self) -> None:
        """All learners train H steps, contribute to every fragment, and pull every new version."""
        self._version += 1
        await asyncio.gather(*(learner.step(self._version * SYNC_EVERY) for learner in self._learners))
        await asyncio.gather(*(learner.contribute_to(len(learner.fragments)) for learner in self._learners))
        await asyncio.gather(*(learner.pulled(self._version) for learner in self._learners))

    async def reports(self) -> float:
        """CPU seconds of the shards for one report of a learner, without their idle load."""
        before = self.used()
        await asyncio.sleep(SETTLE_S)
        begun = self.used()
        resting = _cpu_rate(before, begun)
        for _ in range(REPORTS):
            await asyncio.gather(*(learner.report() for learner in self._learners))
        for _ in range(SETTLES_MAX):  # the shards may not have read all reports yet
            last = self.used()
            await asyncio.sleep(SETTLE_S)
            now = self.used()
            if _cpu_rate(last, now) < 1.5 * resting:
                break
        used_s = (_cpu_rate(begun, now) - resting) * (now.seconds - begun.seconds)
        return max(0.0, used_s) / (REPORTS * len(self._learners) / len(self._shards))

    async def end(self) -> None:
        await asyncio.gather(*(learner.leave() for learner in self._learners))


# ------------------------------------------------------------ what is shown

HEAD = (
    f"{'learners':>8} {'fragments':>9} {'M params':>8} {'shards':>6} {'s/round':>8} {'shard CPU s':>11} {'law':>7} "
    f"{'ms/contribution':>15} {'us/report':>9} {'per core: pushes/s':>18} {'MB/s':>6} {'cores':>5} {'peak MB':>8} "
    f"{'open MB':>8}"
)


def line_of(cost: Cost, law: CpuLaw | None = None) -> str:
    """One line of the table. With several shards, it shows the busiest."""
    cpu = max(cost.shard_cpu_s)
    each = 1000 * sum(cost.shard_cpu_s) / cost.contributions
    expected = f"{law.seconds(cost) / cost.shards:7.3f}" if law else f"{'':>7}"
    size, peak, most = cost.parameters / 1e6, max(cost.peak_bytes) / 1e6, max(cost.open_bytes) / 1e6
    return (
        f"{cost.learners:>8} {cost.fragments:>9} {size:>8.2f} {cost.shards:>6} {cost.seconds:>8.3f} {cpu:>11.3f} "
        f"{expected} {each:>15.2f} {1e6 * cost.report_cpu_s:>9.0f} {cost.contributions_per_core_s:>18.0f} "
        f"{cost.bytes_per_core_s / 1e6:>6.0f} {cost.cores:>5.2f} {peak:>8.0f} {most:>8.1f}"
    )


def report(costs: Sequence[Cost]) -> tuple[CpuLaw, MemoryLaw]:
    """Print the laws and the table."""
    single = [cost for cost in costs if cost.shards == 1]
    cpu, memory = fit_cpu(single), fit_memory(single)
    print(f"\n{HEAD}")
    for cost in costs:
        print(line_of(cost, cpu))
    print(f"\n{cpu.words()}\n\n{memory.words()}")
    return cpu, memory


def save(costs: Sequence[Cost], path: Path) -> None:
    single = [cost for cost in costs if cost.shards == 1]
    laws = {"cpu_law": asdict(fit_cpu(single)), "memory_law": asdict(fit_memory(single))} if single else {}
    found = {**laws, "costs": [asdict(cost) for cost in costs]}
    path.write_text(json.dumps(found, indent=2) + "\n")


def load(path: Path) -> list[Cost]:
    return [Cost(**cost) for cost in json.loads(path.read_text())["costs"]]


async def sweeps(args: argparse.Namespace, costs: list[Cost]) -> None:
    """Measure case by case, in one event loop, because gRPC cannot change it. Adds to the costs, and saves them."""
    measured = {(c.sweep, c.learners, c.fragments, c.parameters, c.shards) for c in costs}
    print(HEAD)
    for sweep in args.only:
        for case in SWEEPS[sweep][: max(1, round(args.largest * len(SWEEPS[sweep])))]:
            cut_in = cut(tensors_of(case.parameters), case.fragments, case.shards)
            if (sweep, case.learners, len(cut_in.fragments), cut_in.num_elements, case.shards) in measured:
                continue
            costs.append(await measure(sweep, case, args.rounds, args.seconds))
            print(line_of(costs[-1]), flush=True)
            costs.sort(key=lambda cost: list(SWEEPS).index(cost.sweep))
            if args.json:
                save(costs, args.json)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what a shard costs as learners, fragments, parameters grow.")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SWEEPS), help=",".join(SWEEPS))
    parser.add_argument("--rounds", type=int, default=3, help="measured in each case, after one that is not")
    parser.add_argument("--seconds", type=float, default=1.0, help="of more rounds, where those take less")
    parser.add_argument("--largest", type=float, default=1.0, help="share of each sweep's cases, smallest first")
    parser.add_argument("--json", type=Path, help="write the figures to this file, beside those of other sweeps there")
    parser.add_argument("--resume", action="store_true", help="measure only the cases that are not in --json yet")
    parser.add_argument("--draw", type=Path, help="measure nothing: draw the figures of this file")
    parser.add_argument("--plot", type=Path, default=DOCS / "growth.png")
    args = parser.parse_args()
    if unknown := set(args.only) - set(SWEEPS):
        parser.error(f"no such sweep: {', '.join(sorted(unknown))}; there are {', '.join(SWEEPS)}")
    torch.set_num_threads(1)

    if args.draw:
        costs = load(args.draw)
    else:
        costs = load(args.json) if args.json is not None and args.json.exists() else []
        if not args.resume:
            costs = [cost for cost in costs if cost.sweep not in args.only]
        asyncio.run(sweeps(args, costs))
    cpu, memory = report(costs)
    if {cost.sweep for cost in costs} >= set(growth_plot.DRAWN):
        growth_plot.draw(costs, cpu, memory, args.plot)
    large = [c for c in costs if c.sweep == "parameters" and c.parameters >= LARGE]
    return 0 if all(c.own_bytes / c.parameters < BYTES_PER_PARAMETER_MAX for c in large) else 1


if __name__ == "__main__":
    sys.exit(main())
