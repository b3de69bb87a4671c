"""The history of a shard: joins, evictions, contributions, and the versions that it made and announced."""

from __future__ import annotations

import torch

from diloco_common.codec import decode_payload
from diloco_common.history import HistoryFile, fingerprint
from diloco_common.messages import Outcome, PushAnswer, PushHeader
from diloco_common.ports import History
from diloco_common.settings import Settings
from diloco_server.core.effects import Event, LearnerGone, LearnerJoined, MergeRound, RoundOpened
from diloco_server.core.fragment import FragmentState


class ShardHistory:
    """Writes down what happened to one shard in one epoch. `diloco_common/histories.py` has all lines."""

    def __init__(self, history: History, epoch: int) -> None:
        self._history = history
        history.write("born", role="shard", epoch=epoch)

    @classmethod
    def of(cls, settings: Settings, epoch: int) -> ShardHistory | None:
        """None where nothing is to be recorded. Raises OSError."""
        folder = settings.run.history
        return cls(HistoryFile(folder, f"shard-{settings.shard.index}"), epoch) if folder else None

    def note(self, event: Event) -> None:
        """An event of the core."""
        match event:
            case RoundOpened():
                self._history.write("opened", fragment=event.fragment_id, round=event.round, asked=event.asked)
            case LearnerJoined():
                self._history.write("joined", learner=event.learner_id, generation=event.generation)
            case LearnerGone():
                self._history.write("gone", learner=event.learner_id, generation=event.generation, code=event.code)

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
             "tokens": c.tokens, "steps": c.steps}
            for c in merge.contributions
        ]  # fmt: skip
        self._history.write("merging", fragment=merge.fragment_id, version=merge.version, contributions=contributions)

    def announcing(self, state: FragmentState, stored_epoch: int | None = None) -> None:
        """A version is durable, the core has it, and nobody has heard of it yet.

        `stored_epoch`: of an earlier epoch's version, what its name on the disk says; it may have another name now.
        """
        values, published = state.values, state.published
        assert values is not None
        assert published is not None
        decoded = torch.empty(published.values.header.num_elements)
        decode_payload(published.values, decoded)
        facts = {} if stored_epoch is None else {"stored_epoch": stored_epoch}
        self._history.write(
            "announced" if stored_epoch is None else "restored",
            fragment=state.fragment.fragment_id, epoch=state.epoch, version=state.version,
            checksum=fingerprint(decoded.numpy().tobytes()),
            state=fingerprint(*(part.numpy().tobytes() for part in (values.theta, *values.buffers))),
            tokens_merged=state.tokens_merged, **facts,
        )  # fmt: skip
