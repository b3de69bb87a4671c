"""How much work came through, from histories and the course of a cluster.

alive      from when a worker asks to join until it is killed, less the time that it was frozen
tokens     of merged contributions, per fragment: what is accepted twice (fenced off, then sent again) counts once
goodput    tokens per alive worker-second, or per second, over that of a fault-free run of the same length
progress   share of the time in which the job as a whole got on: seconds in which a version was announced
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from diloco_deploy.chaos.cluster import Course
from diloco_deploy.chaos.histories import Histories, Life


@dataclass(frozen=True)
class Work:
    """What a cluster did in its measured time."""

    seconds: float
    alive_s: float
    """Summed over the workers."""
    workers: int
    tokens: float
    """Trained in that time and merged, then or soon after; mean over the fragments."""
    tokens_accepted: float
    """By the shards in that time, mean over the fragments; more than once where a contribution was sent again."""
    step_s: float
    """Median time of an inner step of the living: near that of a fault-free run, or the living were faster."""
    progress: float
    """Share of the seconds in which a version was announced: the global model moved."""

    @property
    def per_alive_s(self) -> float:
        return self.tokens / self.alive_s if self.alive_s else 0.0

    @property
    def dead_share(self) -> float:
        """Share of all worker-seconds in which the worker was dead, starting or frozen."""
        return 1.0 - self.alive_s / (self.seconds * self.workers)


def work_of(histories: Histories, course: Course) -> Work:
    """What came of the measured time."""
    fragments = max(1, histories.num_fragments)
    accepted = sum(
        line["tokens"]
        for life in histories.shard_lives()
        for line in life.of("accepted")
        if course.began <= line["t"] <= course.ended
    )
    merged = tokens_merged(histories, course).total()
    alive_s = sum(end - begin for life in histories.worker_lives() for begin, end in alive_times(life, course))
    times = [seconds for life in histories.worker_lives() for seconds in _step_times(life)]
    return Work(
        course.ended - course.began, alive_s, len(histories.workers), merged / fragments, accepted / fragments,
        median(times) if times else 0.0, _progress(histories, course),
    )  # fmt: skip


def tokens_merged(histories: Histories, course: Course) -> Counter[tuple[str, int, int]]:
    """Name of a worker, number of its life, fragment -> tokens that it trained in the measured time and were merged."""
    trained = {
        (life.name, life.number): (tokens_at(life, course.began), tokens_at(life, course.ended))
        for life in histories.worker_lives()
    }
    pushes, merged = histories.pushes(), Counter[tuple[str, int, int]]()
    for merge in histories.merges():
        if (push := pushes.get(merge.push)) is not None:
            name = push.life.name, push.life.number
            low, high = trained[name]
            merged[*name, merge.fragment] += max(0, min(push.since + merge.tokens, high) - max(push.since, low))
    return merged


def tokens_at(life: Life, t: float) -> int:
    """The learner's own count of tokens at a time; what it began its life with, before that."""
    counts = [int(line["tokens"]) for line in life.of("born", "stepped") if line["t"] <= t]
    return counts[-1] if counts else int(life.lines[0]["tokens"])


def alive_times(life: Life, course: Course) -> Iterator[tuple[float, float]]:
    """The parts of the measured time in which this life of a worker was alive and not frozen."""
    begin, end = max(life.began, course.began), min(death_of(life, course), course.ended)
    for frozen_from, frozen_to in frozen_times(life, course):
        if begin < min(frozen_from, end):
            yield begin, min(frozen_from, end)
        begin = max(begin, frozen_to)
    if begin < end:
        yield begin, end


def longest_gaps(histories: Histories, course: Course) -> list[tuple[float, str]]:
    """Of each life of a worker, the longest time without an inner step, in seconds, and its name; longest first.

    From its first step on, while it was alive and not frozen.
    """
    gaps = []
    for life in histories.worker_lives():
        steps = steps_of(life)
        if not steps:
            continue
        gone = min(death_of(life, course), max(course.ended, steps[-1]))
        frozen = list(frozen_times(life, course))
        marks = [*steps, max(gone, steps[-1])]
        longest = max(
            end - begin - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in frozen)
            for begin, end in pairwise(marks)
        )
        gaps.append((longest, life.name))
    return sorted(gaps, reverse=True)


def death_of(life: Life, course: Course) -> float:
    """When it was killed; never, if it was not."""
    kills = [deed.began for deed in course.deeds if deed.harm == "kill" and deed.target == life.name]
    return min((at for at in kills if at >= life.began), default=float("inf"))


def frozen_times(life: Life, course: Course) -> list[tuple[float, float]]:
    """When it was frozen, in order."""
    deeds = [deed for deed in course.deeds if deed.harm == "freeze" and deed.target == life.name]
    return sorted((deed.began, deed.ended) for deed in deeds if deed.ended > life.began)


def steps_of(life: Life) -> list[float]:
    """When its inner steps ended."""
    return [float(line["t"]) for line in life.of("stepped")]


def _step_times(life: Life) -> Iterator[float]:
    return (after - before for before, after in pairwise(steps_of(life)))


def _progress(histories: Histories, course: Course) -> float:
    seconds = max(1, int(course.ended - course.began))
    times = (line["t"] - course.began for life in histories.shard_lives() for line in life.of("announced"))
    return len({int(t) for t in times if 0.0 <= t < seconds}) / seconds
