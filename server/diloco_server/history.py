"""The history of a shard: joins, evictions, contributions, and the versions that it made and announced."""

from __future__ import annotations

import torch

from diloco_common.codec import decode_payload
from diloco_common.history import fingerprint
from diloco_common.messages import Outcome, PushAnswer, PushHeader
from diloco_common.ports import History
from diloco_server.core.effects import Fact, LearnerGone, LearnerJoined, MergeRound, RoundOpened
from diloco_server.core.fragment import FragmentState


class ShardHistory:
    """Writes down what happens to one shard in one epoch. `diloco_common/histories.py` has all lines."""

    def __init__(self, history: History, epoch: int) -> None:
        self._history = history
        history.write("born", role="shard", epoch=epoch)

    def note(self, fact: Fact) -> None:
        """Something that the core says has happened."""
        match fact:
            case RoundOpened():
                self._history.write("opened", fragment=fact.fragment_id, round=fact.round, asked=fact.asked)
            case LearnerJoined():
                self._history.write("joined", learner=fact.learner_id, generation=fact.generation)
            case LearnerGone():
                self._history.write("gone", learner=fact.learner_id, generation=fact.generation, code=fact.code)

    def answered(self, learner_id: str, generation: int, header: PushHeader, answer: PushAnswer) -> None:
        """A push got its outcome."""
        if header.is_seed:
            return
        what = "accepted" if answer.outcome is Outcome.ACCEPTED else "declined"
        facts = {} if what == "accepted" else {"outcome": answer.outcome.value, "code": answer.code}
        self._history.write(
            what, learner=learner_id, generation=generation, fragment=header.fragment_id, round=header.round,
            epoch=header.epoch, base=header.base_version, tokens=header.tokens, steps=header.steps, **facts,
        )  # fmt: skip

    def merging(self, merge: MergeRound) -> None:
        """A closed round is about to become a version. Written first: after a crash, the version tells if it did."""
        contributions = [
            {"learner": c.learner_id, "generation": c.generation, "round": c.round, "base": c.base_version,
             "tokens": c.tokens, "steps": c.steps} | ({} if c.counted == c.tokens else {"counted": c.counted})
            for c in merge.contributions
        ]  # fmt: skip
        self._history.write(
            "merging", fragment=merge.fragment_id, version=merge.version, contributions=contributions,
            **({"left_out": list(merge.left_out)} if merge.left_out else {}),
        )  # fmt: skip

    def announcing(self, state: FragmentState) -> None:
        """A version is durable, the core has it, and nobody has heard of it yet."""
        self._version("announced", state)

    def restored(self, state: FragmentState) -> None:
        """This epoch begins with a version that an earlier one has left; it may have another name now."""
        assert state.recovered is not None
        self._version("restored", state, stored_epoch=state.recovered[0])

    def _version(self, what: str, state: FragmentState, **facts: int) -> None:
        values, published = state.values, state.published
        assert values is not None
        assert published is not None
        decoded = torch.empty(published.values.header.num_elements)
        decode_payload(published.values, decoded)
        self._history.write(
            what, fragment=state.fragment.fragment_id, epoch=state.epoch, version=state.version,
            checksum=fingerprint(decoded.numpy().tobytes()),
            state=fingerprint(*(part.view(torch.uint8).numpy().tobytes() for part in (values.theta, *values.buffers))),
            tokens_merged=state.tokens_merged, **facts,
            **({} if state.fragment.traits.is_of_model else {"companion": True}),
        )  # fmt: skip
