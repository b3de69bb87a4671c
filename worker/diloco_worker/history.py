"""The history of a learner: its inner steps, what it pushed, what it heard, and the versions that it applied."""

from __future__ import annotations

from pathlib import Path

from diloco_common.history import HistoryFile, fingerprint
from diloco_common.ports import History
from diloco_worker.core.events import Answered, Arrived
from diloco_worker.core.fragment import Pending
from diloco_worker.session import Session


class LearnerHistory:
    """Writes down what happened to one process of a learner. `diloco_common/histories.py` has all lines."""

    def __init__(self, history: History, inner_step: int, tokens: int) -> None:
        """Counters as they go on from a checkpoint."""
        self._history = history
        history.write("born", role="learner", step=inner_step, tokens=tokens)

    @classmethod
    def of(cls, folder: Path | None, learner_id: str, inner_step: int, tokens: int) -> LearnerHistory | None:
        """None where nothing is to be recorded. Raises OSError."""
        return cls(HistoryFile(folder, learner_id), inner_step, tokens) if folder else None

    def stepped(self, inner_step: int, tokens: int) -> None:
        """An inner step has ended."""
        self._history.write("stepped", step=inner_step, tokens=tokens)

    def pushed(self, pending: Pending, since: int, session: Session) -> None:
        """A contribution is handed out: what was trained while the learner's tokens went from `since` on."""
        if session.epoch != pending.shard_epoch:  # it is not pushed: the shard that asked for it is gone
            return
        self._history.write(
            "pushed", shard_epoch=session.epoch, generation=session.generation, fragment=pending.fragment_id,
            round=pending.round, epoch=pending.epoch, base=pending.base_version, tokens=pending.tokens,
            steps=pending.steps, since=since,
        )  # fmt: skip

    def answered(self, answered: Answered) -> None:
        """A push has its outcome."""
        outcome, code = answered.answer.outcome.value, answered.answer.code
        self._history.write("answered", fragment=answered.fragment_id, round=answered.round, outcome=outcome, code=code)

    def carried(self, pending: Pending) -> None:
        """A contribution counts as not merged; its work goes on to the next one."""
        self._history.write(
            "carried", shard_epoch=pending.shard_epoch, fragment=pending.fragment_id, round=pending.round,
            tokens=pending.tokens,
        )  # fmt: skip

    def applied(self, arrived: Arrived, *, merged: int | None, forgotten: int | None, since: int) -> None:
        """A version lies under the local progress.

        `merged`: round of the contribution that it was found to hold. `forgotten`: of the one that the shard no longer
        knows. `since`: the learner's count of tokens where the work begins that is not merged, as far as it knows.
        """
        checksum = fingerprint(arrived.values.cpu().numpy().tobytes())
        self._history.write(
            "applied", fragment=arrived.fragment_id, epoch=arrived.epoch, version=arrived.version, checksum=checksum,
            merged=merged, forgotten=forgotten, since=since,
        )  # fmt: skip

    def ended(self) -> None:
        """The learner is leaving the run."""
        self._history.write("ended")
