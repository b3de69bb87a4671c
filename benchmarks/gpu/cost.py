"""How much a learner slows training on a device: real batches, default settings, two shards on the same machine.

A turn is 24 steps. Turns with and without `learner.step` alternate in one process, so other load on the machine affects
both equally. Transfers that are in flight at the end of a turn arrive before the next turn, outside of both.

    delayed     seconds of a step on the device's clock, above the median of the steps without a learner
    idle        time on the device's clock from the end of the optimizer's step to the first work of the next forward
                pass, above the same without a learner: the time to apply versions, and to wait for other work
    peak        maximum bytes allocated within a step, above the same before `join`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch
from place import Place, adamw, timed, train_step
from report import MEASURED, Row, judged
from torch import Tensor

import diloco_worker
from diloco_common.codec import num_payload_bytes
from light_learners import Member, running_shards

TURN = 24
WARM_UP = 6
SHARE_OF_TIME = 0.9
"""Share of the time left for a model in which turns may begin."""


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    batch: int
    context: int


SIZES = {"124 M": Size(17, 768, 16, 1024), "1 B": Size(20, 2048, 8, 1024)}
SMALL = Size(2, 64, 4, 64)
FIRST = ("1 B", "device")


@dataclass
class Turns:
    """The measurements of several turns. Lists have one entry per step."""

    device_s: list[float] = field(default_factory=list)
    """Seconds from the start of a step to the start of the next one, on the device's clock."""
    boundary_s: list[float] = field(default_factory=list)
    inside_s: list[float] = field(default_factory=list)
    """Seconds that the training thread spends in `learner.step`."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    shards_cpu_s: float = 0.0
    peak_bytes: int = 0
    peak_of: dict[str, int] = field(default_factory=dict)
    """"push" or "version" -> peak bytes of steps in which one was taken or applied."""
    counted: dict[str, float] = field(default_factory=dict)


def run_turn(
    place: Place, step: Callable[[], Tensor], into: Turns, shards: list[Member], learner: Any = None, tokens: int = 0
) -> None:
    """Take `TURN` steps. With a learner, each step ends in `learner.step`."""
    place.wait()
    marks, counts = [place.mark()], counted(learner)
    began, cpu = time.perf_counter(), time.process_time()
    shards_cpu = sum(shard.cpu_s() for shard in shards)
    first = dict(counts)
    for _ in range(TURN):
        place.reset_peak()
        loss = step()
        marks.append(place.mark())
        if learner is not None:
            entered = time.perf_counter()
            learner.step(tokens=tokens, loss=loss)
            into.inside_s.append(time.perf_counter() - entered)
        marks.append(place.mark())
        # This is the peak of a step whose work is still queued: memory is taken when work is queued, not when it runs.
        peak, now = place.peak_bytes(), counted(learner)
        into.peak_bytes = max(into.peak_bytes, peak)
        for what in (what for what in now if now[what] > counts[what]):
            into.peak_of[what] = max(into.peak_of.get(what, 0), peak)
        counts = now
    place.wait()
    into.wall_s += time.perf_counter() - began
    into.cpu_s += time.process_time() - cpu
    into.shards_cpu_s += sum(shard.cpu_s() for shard in shards) - shards_cpu
    for what, count in counts.items():
        into.counted[what] = into.counted.get(what, 0) + count - first[what]
    into.device_s += [place.between_s(a, b) for a, b in zip(marks[::2], marks[2::2], strict=False)]
    into.boundary_s += [place.between_s(a, b) for a, b in zip(marks[1::2], marks[2::2], strict=True)]


def counted(learner: Any) -> dict[str, float]:
    """Contributions that were encoded (so pushed soon), and versions applied, since the learner joined."""
    if learner is None or learner.core is None:
        return {}
    registry = learner.telemetry.metrics.registry
    applied = registry.get_sample_value("diloco_worker_apply_seconds_count") or 0.0
    encoded = registry.get_sample_value("diloco_worker_encode_seconds_count") or 0.0
    return {"push": encoded, "version": applied}


def settle(learner: Any, until_s: float = 3.0) -> None:
    """Wait until everything in flight has arrived, outside of all turns."""
    ends, before = time.monotonic() + until_s, dict[str, float]()
    while time.monotonic() < ends and (now := counted(learner)) != before:
        before = now
        learner.poll(0.5)


def measure(size: Size, residuals: str, place: Place, until: float) -> tuple[Turns, Turns, dict[str, Any]]:
    """Take turns without a learner and with one until this time. Returns both, and facts about the run."""
    model = place.gpt(size.layers, size.width, size.context)
    params = sum(p.numel() for p in model.parameters())
    optimizer, batches = adamw(place, model), place.batches(size.batch, size.context)

    def step() -> Tensor:
        return train_step(place, model, optimizer, next(batches))

    for _ in range(WARM_UP):
        step()
    place.wait()
    alone, without, beside, process = Turns(), Turns(), Turns(), psutil.Process()
    run_turn(place, step, alone, [])
    host = process.memory_info().rss
    tokens = size.batch * size.context
    with running_shards(2) as shards:
        addresses = [shard.address for shard in shards]
        joining: dict[str, Any] = {"residuals": residuals, "wait_s": 60.0, "log": None}
        with diloco_worker.join(addresses, model, learner_id="card", **joining) as learner:
            for _ in range(2):  # after these, every fragment has had a round
                run_turn(place, step, Turns(), shards, learner, tokens)
            while not beside.device_s or time.time() < until:
                settle(learner)
                run_turn(place, step, without, shards)
                run_turn(place, step, beside, shards, learner, tokens)
            assert learner.core is not None
            policy = learner.core.policy
        host_bytes = process.memory_info().rss - host
    facts = {
        "params": params, "tokens": tokens, "alone_peak": alone.peak_bytes, "host_bytes": host_bytes,
        "push": policy.push_encoding, "pull": policy.pull_encoding,
    }  # fmt: skip
    return without, beside, facts


def rows(name: str, residuals: str, place: Place, without: Turns, beside: Turns, f: dict[str, Any]) -> list[Row]:
    title = f"{name}, residuals on {residuals}"
    steps, usual = len(beside.device_s), median(without.device_s)
    share = (sum(without.device_s) / len(without.device_s)) / (sum(beside.device_s) / steps)
    delays = sorted(s - usual for s in beside.device_s)
    noise = sorted(s - usual for s in without.device_s)
    idle = median(beside.boundary_s) - median(without.boundary_s)
    flops = 6 * f["params"] * f["tokens"]
    reached = matrix_flops(place)
    pushes, versions = (beside.counted.get(what, 0) / steps for what in ("push", "version"))
    each = f["params"] / 24
    pcie = pushes * num_payload_bytes(f["push"], int(each)) + versions * num_payload_bytes(f["pull"], int(each))
    cores = [turns.cpu_s / turns.wall_s for turns in (beside, without)]
    out = [
        judged(f"{title}: tokens per second, of those without a learner", ">= 99 %", share >= 0.99,
               f"{share:.2%}: {f['tokens'] * steps / sum(beside.device_s):,.0f} of "
               f"{f['tokens'] / (sum(without.device_s) / len(without.device_s)):,.0f}; {steps} steps each"),
        judged(f"{title}: 99 % of steps delayed by less than", "1 ms", at(delays, 0.99) < 1e-3,
               f"{1e3 * at(delays, 0.99):.2f} ms (without a learner {1e3 * at(noise, 0.99):.2f} ms)"),
        Row(f"{title}: MFU with, without", "", MEASURED,
            " ".join(f"{flops / t / reached:.1%}" for t in (sum(beside.device_s) / steps, usual))
            + f" of {reached / 1e12:.1f} TFLOP/s, which a matrix product reaches"),
        Row(f"{title}: learner.step on the training thread", "", MEASURED,
            f"median {1e3 * median(beside.inside_s):.2f} ms, 99 % {1e3 * at(sorted(beside.inside_s), 0.99):.2f} ms"),
        Row(f"{title}: idle at the step boundary", "", MEASURED, f"median {1e3 * idle:.3f} ms of {1e3 * usual:.1f} ms"),
        Row(f"{title}: cores of the host", "", MEASURED,
            f"{cores[0] - cores[1]:.2f} above the {cores[1]:.2f} without; two shards "
            f"{beside.shards_cpu_s / beside.wall_s:.2f}"),
        Row(f"{title}: host memory", "", MEASURED, f"{f['host_bytes'] / f['params']:.1f} bytes per parameter"),
        Row(f"{title}: bytes over the bus per step", "", MEASURED,
            f"{pcie / 1e6:.2f} MB, {pcie / f['params']:.3f} per parameter; {pushes:.2f} pushes ({f['push']}), "
            f"{versions:.2f} versions ({f['pull']})"),
    ]  # fmt: skip
    if place.is_card:
        each_of = {what: (peak - f["alone_peak"]) / f["params"] for what, peak in beside.peak_of.items()}
        most, goal = max(each_of.values(), default=0.0), 4.0
        said = ", ".join(f"{peak:.2f} at a {what}" for what, peak in each_of.items())
        out.append(
            judged(f"{title}: peak device memory, bytes per parameter", f"<= {goal:g}", most <= goal,
                   f"{said}; {f['alone_peak'] / f['params']:.1f} before join")
        )  # fmt: skip
    return out


def matrix_flops(place: Place) -> float:
    """FLOP/s that a large matrix product in bfloat16 reaches. On a CPU: a small one in float32."""
    size, dtype = (8192, torch.bfloat16) if place.is_card else (512, torch.float32)
    one = torch.randn(size, size, device=place.device, dtype=dtype)
    return 2 * size**3 / timed(lambda: one @ one, place, 5)


def at(ordered: list[float], share: float) -> float:
    return ordered[max(0, -(-len(ordered) * round(100 * share) // 100) - 1)]


def sized(name: str, residuals: str, share: float, place: Place) -> list[Row]:
    if (name, residuals) != FIRST:
        place.need_card("a card: the first case has rehearsed it")
    size = SIZES[name] if place.is_card else SMALL
    until = time.time() + SHARE_OF_TIME * share * place.left_s()
    found = rows(name, residuals, place, *measure(size, residuals, place, until))
    if place.is_card:
        place.module.empty_cache()
        return found
    # For a model this small, on a busy CPU, seconds and shares say nothing, so they are not judged.
    return [Row(row.name, row.goal, MEASURED, row.figure) for row in found]


CASES = {
    "1 B, residuals on device": partial(sized, "1 B", "device", 0.5),
    "124 M, residuals on device": partial(sized, "124 M", "device", 0.4),
    "1 B, residuals on host": partial(sized, "1 B", "host", 0.9),
}
