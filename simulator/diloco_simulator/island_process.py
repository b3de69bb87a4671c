"""An island of the product in a simulated process: several ranks, each with a learner, crossing boundaries together.

The ranks share one process, since `torchrun` ends all of them when the first one dies. The pushes of a rank end when it
dies. The pushes of the other ranks continue until the process is killed a moment later. Each rank holds some rows of
each tensor. After a restart the number of ranks may differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco_common.errors import DilocoError
from diloco_common.wire.calls import AGAIN_S
from diloco_common.wire.manifest import Fragment
from diloco_simulator.followed import FollowedRun, Trainer
from diloco_simulator.learner_process import SAVES
from diloco_simulator.verify import invariants
from diloco_simulator.world.stage import AVERAGED, Checkpoint, Counting, Stage
from diloco_simulator.world.transport import MemoryTransport
from diloco_worker.core.connection import Caller
from diloco_worker.core.events import Act, Answered, PushContribution, VersionApplied
from diloco_worker.core.fragment import Fate, LearnerFragment
from diloco_worker.core.parts import Holding, LocalFragment, Sharing, local_fragment
from diloco_worker.core.replica import Replica
from diloco_worker.learner import make_learner
from diloco_worker.shell.boundary import Start
from diloco_worker.shell.council import IslandCouncil

RESTART_S = 1.0
"""Longest time until the launcher ends the other ranks after one has died, in seconds."""
RANKS_MAX = 4


class IslandProcess(Trainer):
    def __init__(self, cluster: Stage, learner_id: str, flat: Tensor, start: Start) -> None:
        super().__init__(cluster, learner_id)
        size = self._random.randint(2, RANKS_MAX)
        self.posted: list[bytes | None] = [None] * size
        self._trained = start.inner_step, start.tokens
        self._leaving = asyncio.Event()
        self._left = 0
        history = cluster.history_of(learner_id)
        self.ranks = [
            SimulatedRank(self, rank, size, flat, start, history if rank == 0 else None) for rank in range(size)
        ]
        self.learner = self.ranks[0].learner
        self.process.start(self._live(), self.name)

    def lose_rank(self) -> None:
        """One rank dies: all its work stops, and no rank crosses another boundary."""
        rank = self._random.choice(self.ranks)
        self.stage.note("killed", self.name, f"rank {rank.rank} of {len(self.ranks)}")
        rank.die()

    async def goodbye(self) -> None:
        self._left += 1
        if self._left == len(self.ranks):
            self._leaving.set()
        await self._leaving.wait()

    # ------------------------------------------------------------ the training loop

    async def _live(self) -> None:
        try:
            for rank in self.ranks:
                rank.learner.start()
            while not self._alike("begin", [rank.begins() for rank in self.ranks]):
                await asyncio.sleep(AGAIN_S)
                await self._all_live()
            self.state = "training"
            while not self._alike("done", [rank.learner.done for rank in self.ranks]):
                await self._step()
            self.state = "leaving"
            await asyncio.gather(*(rank.leave() for rank in self.ranks))
            self.state = "done"
        except DilocoError as error:
            self.error, self.state = error, "failed"

    async def _step(self) -> None:
        await asyncio.sleep(self._step_s * self._random.uniform(0.8, 1.2))
        await self._hang(0.0)
        await self._all_live()
        tokens = [self._random.randint(1, 2) for _ in self.ranks]
        self._trained = self._trained[0] + 1, self._trained[1] + sum(tokens)
        errors = []
        for rank, mine in zip(self.ranks, tokens, strict=True):
            try:
                rank.step(sum(tokens), mine)
            except DilocoError as error:
                errors.append(error)
        if errors:
            self._alike("end", [error.code for error in errors] + [""] * (len(self.ranks) - len(errors)))
            raise errors[0]
        self._alike("hold", [rank.decided() for rank in self.ranks])
        if self._random.random() < SAVES:
            self._save()

    def _save(self) -> None:
        flat = torch.zeros_like(self.ranks[0].model.flat)
        for rank in self.ranks:
            rank.model.save_rows(flat, rank.holdings)
        states = [rank.learner.state_dict() for rank in self.ranks]
        saved = self._alike("save", [(state["inner_step"], state["tokens"]) for state in states])
        invariants.checkpoints_count_what_they_hold(self.name, saved, self._trained)
        self.stage.checkpoints[self.learner_id].append(Checkpoint(flat, *saved))

    async def _all_live(self) -> None:
        """If a rank is dead, wait until somebody ends the process."""
        if not all(rank.is_alive for rank in self.ranks):
            await asyncio.Event().wait()

    def _alike(self, what: str, answers: Sequence[Any]) -> Any:
        invariants.ranks_decide_alike(self.name, what, answers)
        return answers[0]


class SimulatedRank(FollowedRun):
    """One rank: a learner of the product, its part of the model, and the checks on both."""

    def __init__(self, island: IslandProcess, rank: int, size: int, flat: Tensor, start: Start, history: Any) -> None:
        super().__init__(island.stage, island.process, f"{island.name}/{rank}")
        self.rank = rank
        self.model = Rows(flat)
        self.holdings = {
            name: Holding(p.numel() * rank // size, p.numel() * (rank + 1) // size)
            for name, p in self.model.named_parameters()
        }
        self.replica = RowsReplica(self.model, self.holdings, rank, size, self._poison)
        self._island = island
        options, process = island.stage.options, island.process
        caller = Caller("local", island.learner_id, island.name, rank, process.clock())
        telemetry = self._telemetry(caller, history)
        self.learner = make_learner(
            self.replica, [str(i) for i in range(options.shards)], caller, self._dial, process.world(), self,
            telemetry, start, council=IslandCouncil(rank, size, self, island.goodbye),
        )  # fmt: skip

    # ------------------------------------------------------------ the product's exchange and background

    def begin(self, frame: bytes) -> None:
        self._next = frame

    def look(self) -> list[bytes] | None:
        """All ranks have posted at this boundary, since they look between two steps."""
        return [rank._next for rank in self._island.ranks]

    def end(self) -> list[bytes] | None:
        """All ranks have posted at the previous boundary, since they cross each boundary one after the other."""
        posted = self._island.posted
        if self.rank == 0:
            posted[:] = [getattr(rank, "_next", None) for rank in self._island.ranks]
        return None if posted[0] is None else [frame for frame in posted if frame is not None]

    def die(self) -> None:
        self.is_alive = False
        if self._running is not None:
            self._running.cancel()

    def _dial(self, address: str) -> MemoryTransport:
        path = self._island.learner_id, int(address)
        return MemoryTransport(
            self.stage.network, self.process, path, lambda header, payload: None, lambda header, code: None,
            self.stage.options.call_s,
        )  # fmt: skip

    # ------------------------------------------------------------ training, and what must hold

    def step(self, all_tokens: int, tokens: int) -> None:
        """Move this rank's model by what all ranks have trained, then cross the step boundary and check."""
        self.model.train_on(all_tokens)
        self.learner.step(tokens)
        self._check_refusals()
        for fragment in self._fragments():
            anchor = fragment.tensors.anchor
            if anchor is None:
                continue
            account = self._account(fragment)
            self._measure(account, fragment)
            if anchor.numel():
                invariants.progress_is_kept(
                    self._name, fragment.fragment.fragment_id, self._part(self.model.flat, fragment.tensors.fragment),
                    anchor.float(), self._unmerged(fragment), account.largest,
                )  # fmt: skip

    def decided(self) -> Any:
        """Everything that must be equal on all ranks."""
        core = self.learner.core
        assert core is not None
        return core.inner_step, core.tokens, self.learner.tokens_merged, [
            (f.epoch, f.version, f.asked, f.contribution and (f.contribution.round, f.contribution.tokens))
            for f in core.fragments.values()
        ]  # fmt: skip

    def _poison(self, out: Tensor) -> None:
        """Called with each snapshot: puts NaN into the next ones of the last rank, if the cluster wants it."""
        if self._island.not_finite and self.rank == len(self._island.ranks) - 1 and out.numel():
            self._island.not_finite -= 1
            self._island.poisoned += 1
            out[0] = float("nan")

    def _watch(self, act: Act) -> None:
        if isinstance(act, PushContribution):
            self.stage.count("parts taken")
        if isinstance(act, Answered):
            invariants.parts_belong_together(self._island.name, act.fragment_id, act.answer.code)
        if isinstance(act, VersionApplied):
            core = self.learner.core
            assert core is not None
            fragment = core.fragments[act.fragment_id]
            account = self._account(fragment)
            contribution = act.contribution
            if contribution is not None and act.fate is not Fate.CARRIED:
                tensors = contribution.tensors
                assert tensors.snapshot is not None
                account.merged = account.merged - tensors.snapshot

    def _trained(self, fragment: LearnerFragment) -> Tensor:
        return self._part(self.model.trained, fragment.tensors.fragment)

    def _part(self, flat: Tensor, local: Fragment) -> Tensor:
        """The rank's part of a fragment, from values of the whole model."""
        out = torch.zeros(local.num_elements)
        for piece in local.pieces:
            start = self.model.offsets[piece.tensor] + self.holdings[piece.tensor].start + piece.tensor_offset
            out[piece.bounds] = flat[start : start + piece.num_elements]
        return out


class Rows(Counting):
    """The model of one rank; only its own rows count."""

    def __init__(self, flat: Tensor) -> None:
        super().__init__(flat)
        self.offsets = {name: int(p.storage_offset()) for name, p in self.named_parameters()}

    def save_rows(self, flat: Tensor, holdings: dict[str, Holding]) -> None:
        for name, held in holdings.items():
            rows = slice(self.offsets[name] + held.start, self.offsets[name] + held.stop)
            flat[rows] = self.flat[rows]


class RowsReplica(Replica):
    """One rank's part of the model, as under FSDP2; snapshots may go wrong."""

    def __init__(
        self, model: Counting, holdings: dict[str, Holding], rank: int, size: int, meanwhile: Callable[[Tensor], None]
    ) -> None:
        """`meanwhile` is called with every snapshot."""
        super().__init__(model, AVERAGED)
        rows = {name: slice(held.start, held.stop) for name, held in holdings.items()}
        self.hold({name: p.detach().view(-1)[rows[name]] for name, p in self.parameters.tensors.items()})
        self._holdings, self._rank, self._size, self._meanwhile = holdings, rank, size, meanwhile

    def held(self, fragment: Fragment) -> LocalFragment:
        return local_fragment(fragment, self._holdings, Sharing(), self._rank, self._size)

    def progress(self, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
        super().progress(fragment, anchor, out)
        self._meanwhile(out)
