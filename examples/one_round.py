"""One whole round, to be read from the top: a real shard and two learners in one process, in virtual time.

    python examples/one_round.py

No threads, no sockets, no disk: this file is the shell around the cores. Everything is decided and computed by the
code that runs in production. What to read next, in this order:

    common/diloco_common/wire/messages.py            the messages
    server/diloco_server/core/round.py          a round: who is asked, who has answered, when it may close
    server/diloco_server/core/rounds.py         all rounds of a shard, and what happens to a push
    server/diloco_server/core/fragment.py       a fragment on the shard: versions
    worker/diloco_worker/core/fragment.py       a fragment on a learner: anchor, contribution, fate
    worker/diloco_worker/learner.py             the step boundary
    server/diloco_server/shell/driver.py              what the shell does for the shard
"""

from __future__ import annotations

import torch
from torch import nn

from diloco_common.codec import encode_payload
from diloco_common.codec.change import decode_version
from diloco_common.settings import Settings, SyncSettings
from diloco_common.wire.messages import PROTOCOL, Collect, Committed, JoinRequest, Progress, PushHeader
from diloco_lab.shard import LockstepShard
from diloco_server.core.effects import Tell
from diloco_server.core.ledger import ContributionAnswered, Fact
from diloco_server.core.membership import Member
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica

EPOCH = 1
"""The shard's epoch. A restarted shard has another, so nobody mistakes its rounds for earlier ones."""
H = 4
"""Inner steps between two versions of a fragment."""
TOKENS = 256
"""Tokens of one batch."""


def say(now: float, who: str, what: str) -> None:
    print(f"{now:4.1f} s  {who:<8} {what}")


class OneShard(LockstepShard):
    """The shard, and one mailbox per learner in place of its control stream."""

    def __init__(self) -> None:
        self.now = 0.0
        self.mailboxes: dict[str, list[Collect | Committed]] = {}
        sync = SyncSettings(sync_every=H, fragments=1, quorum="all", push="float32", pull="float32")
        super().__init__(Settings(sync=sync), EPOCH, lambda: self.now)

    def tell(self, tell: Tell) -> None:
        if isinstance(tell.directive, Collect | Committed):
            self.mailboxes[tell.learner_id].append(tell.directive)

    def note(self, event: Fact) -> None:
        if isinstance(event, ContributionAnswered):
            say(self.now, "shard", f"{event.answer.outcome.name}: the contribution of {event.learner_id}")
        else:
            say(self.now, "shard", str(event))


class OneLearner:
    """A model, its inner optimizer, and the core that answers rounds."""

    def __init__(self, name: str, shard: OneShard) -> None:
        self.name, self.shard = name, shard
        self.mailbox = shard.mailboxes.setdefault(name, [])
        self.data = torch.Generator().manual_seed(sum(name.encode()))
        torch.manual_seed(0)  # all learners begin with the same model
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        replica = Replica(self.model)
        joined = shard.shard.join(
            name, JoinRequest(PROTOCOL, f"process of {name}", replica.specs), shard.now
        )  # a lease
        self.generation = joined.generation
        assert shard.shard.manifest is not None  # the shard has cut the model into fragments
        self.core = LearnerCore(replica, shard.shard.manifest, shard.shard.join_answer().policy)
        self.begin()

    @property
    def member(self) -> Member:
        return self.shard.shard.check(self.name, self.generation, EPOCH)

    def begin(self) -> None:
        """Get version 0: the first learner brings it, and all pull it."""
        if not self.shard.shard.versions.owned(0).seeded:
            payload = encode_payload(self.core.fragments[0].tensors.values(), "float32")
            self.shard.push(self.member, PushHeader(0, 0, EPOCH, 0, 0, 0, payload.header, self.digest), payload)
        self.pull()

    @property
    def digest(self) -> str:
        return self.core.manifest.digest

    def train(self) -> float:
        """One inner step. It knows nothing about rounds."""
        inputs = torch.randn(TOKENS, 8, generator=self.data)
        loss = (self.model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def boundary(self, loss: float) -> None:
        """Between two steps: count, handle the messages that arrived, answer the round that asked, and report."""
        self.core.stepped(TOKENS)
        while self.mailbox:
            match self.mailbox.pop(0):
                case Collect() as asked:
                    say(self.shard.now, self.name, f"is asked for fragment {asked.fragment_id}, round {asked.round}")
                    self.core.collect(asked, EPOCH)
                case Committed(version=version) if version:
                    say(self.shard.now, self.name, f"pulls version {version}")
                    self.pull()
        for taken in self.core.contribute():  # the pseudo-gradient: anchor - parameters
            payload = taken.tensors.encode("float32")
            header = PushHeader(
                taken.fragment_id, taken.round, EPOCH, taken.base_version, taken.tokens, taken.steps, payload.header,
                self.digest,
            )  # fmt: skip
            say(self.shard.now, self.name, f"pushes {taken.steps} steps on {taken.tokens} tokens")
            answer = self.shard.push(self.member, header, payload)
            self.core.answered(0, taken.round, answer)
        self.shard.shard.progress(self.member, Progress(self.core.inner_step, self.core.tokens, loss), self.shard.now)
        self.shard.advance()  # the shard decides: open a round, close one, or nothing

    @torch.no_grad()
    def pull(self) -> None:
        """Move the parameters to the latest version; what was trained since the contribution is added to it."""
        version, payload = self.shard.shard.published(0)
        merged = self.shard.shard.versions.owned(0).status(self.name).merged_version
        self.core.arrived(0, version, EPOCH, decode_version(payload, None)[0], merged)


def main() -> None:
    shard = OneShard()
    learners = [OneLearner("paris", shard), OneLearner("tokyo", shard)]
    while min(learner.core.fragments[0].version for learner in learners) < 1:
        for learner in learners:
            learner.boundary(learner.train())
        shard.now += 1.0
        shard.advance()
    first, second = (torch.cat([p.flatten() for p in learner.model.parameters()]) for learner in learners)
    say(
        shard.now,
        "end",
        f"both have version 1; their parameters differ by {float((first - second).detach().norm()):.3f}:",
    )
    print("                 what each trained while the round was under way")


if __name__ == "__main__":
    main()
