"""The share of requested contributions that is absent or late, and the pace: H = 24 against `sync.sync_every = "auto"`.

Drives production cores (a shard, and learners that share one tiny model) in virtual time. Links are modeled: each
direction carries one message at a time, at a bandwidth plus a latency. A fragment stands for N / P parameters. Step
times vary by a tenth, messages by some milliseconds; the shard ticks every 20 ms, as its host does.

    python benchmarks/late_share.py                # the table of docs/wan.md
    python benchmarks/late_share.py --steps 11 --links 1000 --params 4e5 --burst 128 --rest 1
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.change import decode_version
from diloco_common.formulas import BITS
from diloco_common.settings import Settings, SyncSettings
from diloco_common.wire.messages import PROTOCOL, Collect, Committed, Directive, JoinRequest, Progress, PushHeader
from diloco_lab.lockstep import EPOCH, Clock
from diloco_lab.shard import LockstepShard, run_to_end
from diloco_server.core.effects import Tell
from diloco_server.core.ledger import Fact, RoundClosed
from diloco_server.core.merge import piece_norms
from diloco_server.shell.driver import Job
from diloco_worker.core.fragment import PendingContribution
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica

FRAGMENTS = 24
WIDTH = 64
"""Parameters per fragment of the tiny model, which stand for more."""
LATENCY_S = {1000: 0.0005, 100: 0.01, 20: 0.02}
"""One way, by Mbit/s."""
TICK_S, MERGE_S, ENCODE_S, NOISE, TOKENS = 0.02, 0.002, 0.002, 0.1, 1024


class ShardRig(LockstepShard):
    def __init__(self, run: Run, sync: SyncSettings) -> None:
        super().__init__(Settings(sync=sync), EPOCH, lambda: run.clock.now)
        self.run, self.asked, self.absent, self.pushed, self.late = run, 0, 0, 0, 0

    def tell(self, tell: Tell) -> None:
        self.run.learners[tell.learner_id].told(tell.directive)

    def start(self, job: Job, name: str) -> None:
        def work() -> None:
            run_to_end(job)
            self.advance()

        self.run.clock.after(MERGE_S, work)

    def note(self, event: Fact) -> None:
        if isinstance(event, RoundClosed) and self.run.counts:
            self.asked, self.absent = self.asked + event.asked, self.absent + event.absent


class LearnerRig:
    """A learner that steps, and its link in both directions."""

    def __init__(self, run: Run, name: str, step_s: float) -> None:
        self.run, self.name, self.step_s, self.draw = run, name, step_s, random.Random(name)
        self.model = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(FRAGMENTS))
        self.replica = Replica(self.model)
        shard, now = run.shard.shard, run.clock.now
        self.member = shard.join(name, JoinRequest(PROTOCOL, name, tuple(self.replica.specs)), now)
        assert shard.manifest is not None
        self.core = LearnerCore(self.replica, shard.manifest, shard.join_answer().policy)
        self.inbox: list[Callable[[], None]] = []
        self.free_at = {"up": 0.0, "down": 0.0}
        self.pulling: dict[int, Committed] = {}  # announced but not pulled, the newest of each fragment
        self.is_pulling = False
        shard.progress(self.member, Progress(0, 0), now)

    def message(self) -> float:
        """Random travel time of a message, in seconds."""
        return self.run.latency_s + self.draw.expovariate(1 / (0.001 + self.run.latency_s / 10))

    def carry(self, way: str, encoding: str) -> tuple[float, float]:
        """Seconds until a fragment starts to move over the link, and until its last byte has left."""
        now = self.run.clock.now
        begins = max(now, self.free_at[way])
        self.free_at[way] = begins + self.run.params / FRAGMENTS * BITS[encoding] / self.run.bits_per_s
        return begins - now, self.free_at[way] - now

    def told(self, directive: Directive) -> None:
        after = self.run.clock.after
        match directive:
            case Collect():
                after(self.message(), lambda: self.inbox.append(lambda: self.core.collect(directive, EPOCH)))
            case Committed():
                after(self.message(), lambda: self.pull(directive))

    def step(self) -> None:
        with torch.no_grad():
            torch._foreach_add_([*self.model.parameters()], 1e-3)
        self.core.stepped(TOKENS)
        inbox, self.inbox = self.inbox, []
        for arrival in inbox:
            arrival()
        for taken in self.core.contribute():
            self.push(taken)
        took_s = self.step_s * self.draw.uniform(1 - NOISE, 1 + NOISE)
        report = Progress(self.core.inner_step, self.core.tokens, step_time_s=took_s)
        self.run.clock.after(self.message(), lambda: self.report(report))
        rest_s = self.run.rest_s if self.core.inner_step % self.run.burst == 0 else 0.0
        self.run.clock.after(took_s + rest_s, self.step)

    @torch.no_grad()
    def arrived(self, *version: Any) -> None:
        fragment_id, number, values, merged = version
        self.core.arrived(fragment_id, number, EPOCH, values, min(merged, number))

    def report(self, report: Progress) -> None:
        if report.inner_step > self.member.progress.inner_step:
            self.run.shard.shard.progress(self.member, report, self.run.clock.now)
            self.run.shard.advance()

    def push(self, taken: PendingContribution) -> None:
        encoding = self.core.policy.push_encoding
        payload = taken.tensors.encode(encoding)
        header = PushHeader(
            taken.fragment_id, taken.round, EPOCH, taken.base_version, taken.tokens, taken.steps, payload.header,
            self.core.manifest.digest,
        )  # fmt: skip
        begins, ends = (ENCODE_S + seconds for seconds in self.carry("up", encoding))
        way_s = self.message()
        self.run.clock.after(begins + way_s, lambda: self.announce(header, payload, ends - begins))

    def announce(self, header: PushHeader, payload: Payload, bytes_s: float) -> None:
        """The header arrived. A push that is not wanted uses no more of the link."""
        shard = self.run.shard.shard
        answer = shard.admit(self.member, header)
        self.run.shard.pushed += self.run.counts
        if answer is None:
            self.run.clock.after(bytes_s, lambda: self.arrive(header, payload))
            return
        self.run.shard.late += self.run.counts
        self.free_at["up"] -= bytes_s
        self.answer(header, answer)

    def arrive(self, header: PushHeader, payload: Payload) -> None:
        shard, now = self.run.shard.shard, self.run.clock.now
        norms = piece_norms(payload, shard.owned(header.fragment_id).fragment.pieces)
        self.answer(header, shard.contribute(self.member, header, payload, norms, now))
        self.run.shard.advance()

    def answer(self, header: PushHeader, answer: Any) -> None:
        done = partial(self.core.answered, header.fragment_id, header.round, answer)
        self.run.clock.after(self.message(), lambda: self.inbox.append(done))

    def pull(self, committed: Committed | None = None) -> None:
        """Pull one fragment at a time, the newest version of each."""
        if committed is not None:
            self.pulling[committed.fragment_id] = committed
        if self.is_pulling or not self.pulling:
            return
        self.is_pulling, fragment_id = True, next(iter(self.pulling))
        del self.pulling[fragment_id]
        self.run.clock.after(self.message(), lambda: self.send(fragment_id))

    def send(self, fragment_id: int) -> None:
        shard = self.run.shard.shard
        version, payload = shard.published(fragment_id)
        merged = shard.owned(fragment_id).status(self.name).merged_version
        _, ends = self.carry("down", self.core.policy.pull_encoding)
        self.run.clock.after(ends, lambda: shard.pulled(self.member, fragment_id, version, self.run.clock.now))

        def arrive() -> None:
            values, _ = decode_version(payload, None)
            self.inbox.append(lambda: self.arrived(fragment_id, version, values, merged))
            self.is_pulling = False
            self.pull()

        self.run.clock.after(ends + self.message(), arrive)


class Run:
    def __init__(self, sync: SyncSettings, learners: int, step_s: float, bits_per_s: float, latency_s: float,
                 params: float, burst: int, rest_s: float) -> None:  # fmt: skip
        self.burst, self.rest_s = burst, rest_s
        self.bits_per_s, self.latency_s, self.params, self.counts = bits_per_s, latency_s, params, False
        self.clock = Clock()
        self.shard = ShardRig(self, sync)
        self.learners = {f"l{i}": LearnerRig(self, f"l{i}", step_s) for i in range(learners)}
        for i, learner in enumerate(self.learners.values()):
            self.begin(learner, step_s + i / learners * (burst * step_s + rest_s))
        self.clock.after(TICK_S, self.tick)

    def begin(self, learner: LearnerRig, after_s: float) -> None:
        shard = self.shard.shard
        for fragment in learner.core.manifest.fragments:
            i = fragment.fragment_id
            if not shard.owned(i).seeded:
                payload = encode_payload(learner.core.fragments[i].tensors.values(), "float32")
                header = PushHeader(i, 0, EPOCH, 0, 0, 0, payload.header, learner.core.manifest.digest)
                self.shard.push(learner.member, header, payload)
                while not shard.owned(i).seeded:
                    self.clock.step()
            learner.core.arrived(i, 0, EPOCH, torch.zeros(WIDTH), 0)
        self.clock.after(after_s, learner.step)

    def tick(self) -> None:
        self.shard.advance()
        self.clock.after(TICK_S, self.tick)

    def until(self, at: float) -> None:
        while self.clock.now < at:
            self.clock.step()


def measure(
    sync: SyncSettings, step_s: float, bits_per_s: float, args: argparse.Namespace
) -> tuple[int, float, float, float]:
    """The final H, the absent share of requests, the late share of pushes, and merged tokens per second."""
    run = Run(
        sync, args.learners, step_s, bits_per_s, LATENCY_S[round(bits_per_s / 1e6)], args.params, args.burst, args.rest
    )
    warm_up = args.warm_up if sync.sync_every == "auto" else 300
    run.until(warm_up * step_s)
    run.counts, shard, began = True, run.shard.shard, run.clock.now
    tokens = shard.tokens_merged
    run.until((warm_up + args.inner_steps) * step_s)
    per_s = (shard.tokens_merged - tokens) / (run.clock.now - began)
    absent, late = run.shard.absent / max(1, run.shard.asked), run.shard.late / max(1, run.shard.pushed)
    return shard.rounds.patience.every.steps, absent, late, per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=float, nargs="*", default=[5, 10, 30, 100, 1000], help="ms")
    parser.add_argument("--links", type=int, nargs="*", default=[1000, 100, 20], choices=[*LATENCY_S], help="Mbit/s")
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--inner-steps", type=int, default=1500)
    parser.add_argument("--warm-up", type=int, default=2500)
    parser.add_argument("--burst", type=int, default=1, help="steps in a row, after which a learner rests")
    parser.add_argument("--rest", type=float, default=0.0, help="s")
    parser.add_argument("--every", nargs="*", default=["24", "auto"])
    args = parser.parse_args()
    print("| link, Mbit/s | step, ms | sync_every | H | absent | late | tokens/s | trained |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for mbit in args.links:
        for ms in args.steps:
            trained = args.learners * TOKENS / (ms / 1e3 + args.rest / args.burst)
            for every in args.every:
                sync = SyncSettings(sync_every=every if every == "auto" else int(every), fragments=FRAGMENTS)
                h, absent, late, per_s = measure(sync, ms / 1e3, mbit * 1e6, args)
                line = (
                    f"| {mbit} | {ms:g} | {every} | {h} | {absent:.1%} | {late:.1%} | {per_s:,.0f} | {trained:,.0f} |"
                )
                print(line, flush=True)


if __name__ == "__main__":
    main()
