"""`join`, and the `Learner` that it gives: what a training loop holds.

    with diloco_worker.join("ps-0:50051,ps-1:50051", model) as learner:
        for batch in loader:
            loss = model(batch).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            learner.step(tokens=batch.numel(), loss=loss)
            if learner.done:
                break

Everything here runs in the training thread; the network has its own (network.py). Between two steps `step` says which
fragments to contribute and lays arrived versions under the local progress: one addition, of what was computed ahead. It
never waits for anybody. The snapshots are copied by another thread (transfer.py) in the moments after `step` or `poll`
returned, so the loop should not put other values into the parameters there (averaged ones, to evaluate them): they
would be contributed, and be taken out again only by the next contribution.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from diloco_common.addresses import parse_address
from diloco_common.codec import native
from diloco_common.endpoints import write_address
from diloco_common.errors import CannotConnect, ConfigError
from diloco_common.http import HttpServer
from diloco_common.identity import check_learner_id
from diloco_common.logs import Log
from diloco_common.manifest import cut
from diloco_common.messages import Progress
from diloco_common.metrics import WorkerMetrics
from diloco_worker.core.events import Answered, Arrived, Asked, Event, Failed, Joined, Stopped
from diloco_worker.core.fragment import Pending
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.core.shards import Shards
from diloco_worker.history import LearnerHistory
from diloco_worker.inbox import Inbox
from diloco_worker.link import ANNOUNCE_WAIT_S
from diloco_worker.network import Network
from diloco_worker.session import LinkContext
from diloco_worker.status import learner_status
from diloco_worker.transfer import Transfer

STEP_TIME_ALPHA = 0.1
"""Weight of the newest inner step in the moving average of step times."""
SEED_HOLD_S = 10.0
"""Where a run is under way, a learner that has nothing of a fragment yet lets those seed it that have trained on it.

So does one that was resumed where there is no run: a model that begins anew is that of a new learner, and not some
fragments of the one and some of the other. If nobody comes, its values are the best that there are."""
AWAY_S = 0.5
"""A learner that was resumed waits so long for shards that do not answer; then it trains on without them."""
APPLY_S = 0.003
"""So long `step` goes on to the next version that has arrived, or for this share of a step; what is left waits for the
next step. One is applied in any case."""
APPLY_SHARE = 0.005
LOSS_EVERY_S = 0.5
"""On an accelerator the loss is read this often: reading waits for the device."""


def join(
    shards: str | Sequence[str],
    model: nn.Module,
    *,
    run: str = "local",
    learner_id: str = "",
    token: str | None = None,
    mean_merge: Collection[str] | None = None,
    inner_step: int = 0,
    tokens: int = 0,
    http: str | None = None,
    address_file: Path | None = None,
    history: Path | None = None,
    wait_s: float | None = None,
    resumed: bool = False,
) -> Learner:
    """Join a run, and return once the model holds the latest version of every fragment.

    Args:
        shards: addresses of all shards, host:port, in any order; a string separates them by commas.
        model: its trainable parameters are synchronised; buffers and the optimizer stay local.
        run: id of the run, as the shards have it.
        learner_id: unique in the run; made from host name and process id if empty.
        token: bearer token, where the shards ask for one.
        mean_merge: names of parameters merged by plain mean; None means embeddings and the output head.
        inner_step: where a resumed learner's count of inner steps goes on.
        tokens: where its count of tokens goes on.
        http: address on which to serve /metrics, /healthz, /readyz and /status; None serves nothing.
        address_file: write the address that is served here, as soon as it is known.
        history: record what happens to this learner in this folder, as JSON lines; None records nothing.
        wait_s: seconds to wait for shards that do not answer; None waits for ever, and says so every 10 s.
        resumed: the model holds values of this run, of a checkpoint: one shard that answers is enough. Training goes
            on from these values where a shard is away, and what it adds is contributed once the shard is back.

    Raises:
        ConfigError: an address is no address, or the shards do not make up one run.
        UnsupportedModel: the model cannot be synchronised; the message says which parameter, and what to do.
        CannotConnect: not all shards answered within `wait_s`.
        Refusal: a shard refuses this learner (other model, other run, wrong token, ...).
    """
    addresses = shards.split(",") if isinstance(shards, str) else list(shards)
    addresses = [str(parse_address(a.strip())) for a in addresses if a.strip()]
    if not addresses:
        raise ConfigError("no shard addresses given; name all shards, such as ps-0:50051,ps-1:50051")
    twice = sorted({a for a in addresses if addresses.count(a) > 1})
    if twice:
        raise ConfigError(f"shard {twice[0]} is named twice; name every shard once")
    name = learner_id or f"{socket.gethostname()[:40]}-{os.getpid()}"
    check_learner_id(name)
    learner = Learner(
        Replica(model, mean_merge), addresses, run, name, token, inner_step, tokens, http, history, resumed=resumed
    )
    try:
        learner._start(address_file, wait_s)
    except BaseException:
        learner.close()
        raise
    return learner


class Learner:
    """One learner of a run. Made by `join`; a context manager that leaves the run at its end."""

    def __init__(
        self, replica: Replica, addresses: Sequence[str], run: str, learner_id: str, token: str | None,
        inner_step: int, tokens: int, http: str | None, history: Path | None = None, *, resumed: bool = False,
    ) -> None:  # fmt: skip
        self.learner_id = learner_id
        self.run = run
        self.metrics = WorkerMetrics()
        self.metrics.training.begun(learner_id)
        self.log = Log(learner_id)
        self.http_address = ""
        self.state = "joining"
        """"joining", "training", "done" or "stopped"."""
        self.loss: float | None = None
        self.step_time_s = 0.0
        self.sync_stall_s = 0.0
        """Seconds that `step` held the training loop, in total."""
        self.sync_stall_max_s = 0.0
        self.started_at = time.monotonic()
        self.core: LearnerCore | None = None
        self._replica = replica
        self._first = (inner_step, tokens)
        self._inbox = Inbox()
        self._shards = Shards(len(addresses))
        self._stop_requested = False
        self._resumed = resumed
        self._acts: list[Callable[[], None]] = []  # for the network thread, at the end of the boundary
        self._step_ended = time.monotonic()
        self._loss_read = 0.0
        self._progress = Progress(inner_step, tokens)
        self._history = LearnerHistory.of(history, learner_id, inner_step, tokens)
        if replica.device.type == "cpu" and isinstance(why := native.find(), str):
            self.log.warning("no native kernels: encoding takes several times as long", why=why)
        self.transfer = Transfer(replica.device, self.metrics)
        context = LinkContext(
            run, learner_id, secrets.token_hex(8), token, tuple(replica.specs), self._inbox, self.transfer,
            self.metrics, self.log, self._report,
        )  # fmt: skip
        server = None
        if http is not None:
            server = HttpServer(
                http, registry=self.metrics.registry, status=lambda: learner_status(self), ready=self._ready
            )
        self.network = Network(addresses, context, server)

    # ------------------------------------------------------------ for the training loop

    def step(self, tokens: int, loss: Tensor | float | None = None) -> None:
        """Say that an inner step on `tokens` tokens has ended. Call after optimizer.step(); never waits.

        Raises:
            Superseded: another process joined with this learner id.
            Refusal: a shard refuses this learner for good.
            ManifestMismatch: a shard that was away when training began is of another run.
        """
        assert self.core is not None
        began = time.monotonic()
        step_s = began - self._step_ended
        self._step_ended = began
        self.step_time_s += (STEP_TIME_ALPHA if self.step_time_s else 1.0) * (step_s - self.step_time_s)
        self._read_loss(loss, began)
        self.core.stepped(tokens)
        if self._history is not None:
            self._history.stepped(self.core.inner_step, self.core.tokens)
        self._take_part(max(APPLY_S, APPLY_SHARE * self.step_time_s))
        self._progress = Progress(self.core.inner_step, self.core.tokens, self.loss, self.step_time_s)
        stall_s = time.monotonic() - began
        self.sync_stall_s += stall_s
        self.sync_stall_max_s = max(self.sync_stall_max_s, stall_s)
        self._acts.append(partial(self._stepped, tokens, step_s, stall_s))
        self._hand_over()

    def poll(self, wait_s: float = 0.0) -> None:
        """Take part between two steps: lay arrived versions under the local progress, and send what rounds ask for.

        `step` does this too; call it where the next step is far away, such as during a long evaluation. Waits up to
        `wait_s` seconds for something to arrive. Raises what `step` raises.
        """
        if wait_s > 0:
            self._inbox.wait(wait_s)
        self._take_part(math.inf)
        self._hand_over()

    @property
    def done(self) -> bool:
        """Whether to stop training: every shard has merged the token budget, or `stop` was called."""
        return self._stop_requested or self._shards.have_stopped

    @property
    def tokens_merged(self) -> int:
        """Tokens that the run has merged so far, over all learners."""
        return max(link.pulse.tokens_merged for link in self.network.links)

    @property
    def tokens_budget(self) -> int:
        """Tokens that the run is to merge; 0 if it has no end."""
        return max(link.pulse.tokens_budget for link in self.network.links)

    @property
    def fraction(self) -> float:
        """Global progress, merged tokens over the budget, from 0 to 1; 0 if there is no budget."""
        return min(1.0, self.tokens_merged / self.tokens_budget) if self.tokens_budget else 0.0

    def stop(self) -> None:
        """Make `done` true. May be called from a signal handler."""
        self._stop_requested = True

    def close(self) -> None:
        """Leave the run: what is being pushed gets a few seconds. Repeating it is fine."""
        if self.state != "stopped":
            self.state = "done" if self._shards.have_stopped else "stopped"
            if self._history is not None:
                self._history.ended()
        self.network.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ joining

    def _start(self, address_file: Path | None, wait_s: float | None) -> None:
        """Dial, and wait until the model holds a version of every fragment; if resumed, of those that can be had."""
        self.http_address = self.network.start()
        if address_file is not None:
            write_address(address_file, "worker", self.learner_id, http=self.http_address)
        began = said = time.monotonic()
        while not self._ready()[0]:
            self.poll(0.2)
            now = time.monotonic()
            if self._resumed and now - began > AWAY_S and self._has_what_can_be_had:
                self.log.event("training without a shard", why=self._ready()[1])
                self._core.begin_without()
                break
            if wait_s is not None and now - began > wait_s:
                raise CannotConnect(f"no run to join after {wait_s:g} s: {self._ready()[1]}")
            if now - said >= ANNOUNCE_WAIT_S:
                self.log.event("waiting", for_s=round(now - began), why=self._ready()[1])
                said = now
        self.state = "training"
        self._step_ended = time.monotonic()

    def _ready(self) -> tuple[bool, str]:
        """Whether the learner has joined every shard and holds every fragment, and what is missing."""
        there = {joined.address for joined in self._shards.joined}
        away = [link.address for link in self.network.links if link.address not in there]
        if away:
            return False, f"no answer from {', '.join(away)}"
        if self.core is None:
            return False, "the model is not cut yet"
        missing = sum(not f.adopted for f in self.core.fragments.values())
        if missing:
            return False, f"{missing} of {len(self.core.fragments)} fragments are not there yet"
        return True, "joined"

    @property
    def _has_what_can_be_had(self) -> bool:
        """Whether there is a fragment from a shard, and all that are missing are of shards that are away."""
        if self.core is None:
            return False
        there = {link.session.shard_index for link in self.network.links if link.connected}
        missing = [f.fragment for f in self.core.fragments.values() if not f.adopted]
        return len(missing) < len(self.core.fragments) and not any(f.shard_index in there for f in missing)

    # ------------------------------------------------------------ a step boundary

    def _take_part(self, apply_s: float) -> None:
        """Take in what came, in order, and send what rounds ask for.

        Stops at a version that cannot be applied while its fragment is read, and once applying took `apply_s` seconds:
        an event may decide over those after it, so none overtakes another.
        """
        began = time.perf_counter()
        while (event := self._inbox.pop()) is not None:
            if isinstance(event, Arrived) and not self._core.rebasable(event.fragment_id):
                self._inbox.put_back(event)
                break
            self._take_in(event)
            self._note_given_back()
            if isinstance(event, Arrived) and time.perf_counter() - began > apply_s:
                break
        if self.core is not None and (taken := self.core.snapshots()):
            self._acts.append(partial(self._push, taken))
            if self._history is not None:  # after it, and so under the same lease
                self._acts.append(partial(self._pushed, taken, [self._since(pending) for pending in taken]))

    def _note_given_back(self) -> None:
        for pending in self._core.take_given_back() if self.core is not None else ():
            if self._history is not None:
                self._history.carried(pending)

    def _hand_over(self) -> None:
        """To the network thread, all at once: each time that it is woken, it may take the processor away."""
        self.network.soon(*self._acts)
        self._acts.clear()

    def _take_in(self, event: Event) -> None:
        match event:
            case Joined():
                self._joined(event)
            case Asked():
                self._core.collect(event.directive, event.epoch)
            case Answered():
                if self._history is not None:
                    self._history.answered(event)
                before = self._core.tokens_carried
                self._core.answered(event.fragment_id, event.round, event.answer)
                self.metrics.exchange.carried((self._core.tokens_carried - before) / len(self._core.fragments))
            case Arrived():
                self._arrived(event)
            case Stopped():
                self._shards.stop(event.shard_index)
            case Failed():
                self.state = "stopped"
                raise event.error

    @property
    def _core(self) -> LearnerCore:
        assert self.core is not None
        return self.core

    def _joined(self, joined: Joined) -> None:
        """A shard gave a lease: the first one tells how the model is cut; once all did, seed what is empty."""
        is_new = self._shards.join(joined)
        if self.core is None:
            self._cut(joined)
        if is_new:
            self._shards.check(joined, self._core.manifest.digest, self._core.policy)
        self._core.rejoined(joined.fragments, joined.epoch)
        if self._shards.are_complete:
            for shard in self._shards.joined if is_new else (joined,):
                self._seed(shard)

    def _cut(self, first: Joined) -> None:
        """Cut the model as a shard says that all do."""
        manifest = cut(self._replica.specs, first.num_fragments, first.num_shards)
        self.core = LearnerCore(self._replica, manifest, first.policy)
        self.core.inner_step, self.core.tokens = self._first
        self.transfer.shift_to = self.core.shift_to
        for link in self.network.links:
            self._acts.append(partial(link.know, manifest))

    def _seed(self, joined: Joined) -> None:
        """Offer the fragments that the shard lacks: at the start, and when it came back with nothing."""
        link = self.network.link_to(joined.shard_index)
        if link is None:  # the shard came back as another one meanwhile
            return
        others_may_know_more = self.tokens_merged > 0 or self._resumed
        for status in joined.fragments:
            if not status.seeded:
                fragment = self._core.fragments[status.fragment_id]
                hold_s = SEED_HOLD_S if others_may_know_more and not fragment.adopted else 0.0
                self._acts.append(partial(link.seed, status.fragment_id, fragment.values(), hold_s))

    @torch.no_grad()
    def _arrived(self, event: Arrived) -> None:
        began, cpu_began = time.perf_counter(), time.thread_time()
        before, fragment = self._core.tokens_carried, self._core.fragments[event.fragment_id]
        pending, merges = fragment.pending, self._core.contributions["merged"]
        replaced = fragment.anchor, pending, event.shift
        forgotten = self._core.contributions["forgotten"]
        if self._core.arrived(
            event.fragment_id, event.version, event.epoch, event.values, event.merged_version, event.shift,
            event.forgotten_version,
        ):  # fmt: skip
            seconds, cpu_seconds = time.perf_counter() - began, time.thread_time() - cpu_began
            if self._history is not None:
                number, fates = pending.round if pending is not None else None, self._core.contributions
                self._history.applied(
                    event, merged=number if fates["merged"] > merges else None,
                    forgotten=number if fates["forgotten"] > forgotten else None,
                    since=self._core.tokens - fragment.tokens_since(self._core.tokens),
                )  # fmt: skip
            if self._core.contributions["forgotten"] > forgotten:
                assert pending is not None
                self.log.warning(
                    "the shard has forgotten whether a contribution was merged: it is not pushed again",
                    fragment=event.fragment_id, round=pending.round, tokens=pending.tokens,
                )  # fmt: skip
            carried = (self._core.tokens_carried - before) / len(self._core.fragments)
            applied = partial(self._applied, event.fragment_id, event.version, seconds, cpu_seconds, carried, replaced)
            self._acts.append(applied)

    # ------------------------------------------------------------ in the network thread

    def _push(self, taken: Sequence[Pending]) -> None:
        for pending in taken:
            link = self.network.link_to(self._core.manifest.fragments[pending.fragment_id].shard_index)
            if link is None:  # its shard came back as another one: the work waits for the one that owns the fragment
                pending.leave_unread()
            else:
                link.push(pending)

    def _pushed(self, taken: Sequence[Pending], since: Sequence[int]) -> None:
        assert self._history is not None
        for pending, tokens in zip(taken, since, strict=True):
            link = self.network.link_to(self._core.manifest.fragments[pending.fragment_id].shard_index)
            if link is not None:
                self._history.pushed(pending, tokens, link.session)

    def _applied(
        self, fragment_id: int, version: int, seconds: float, cpu_seconds: float, carried: float, replaced: object
    ) -> None:
        """`replaced`: freed here, as giving so much memory back can take longer than the apply did."""
        self.metrics.exchange.applied(fragment_id, version, seconds)
        self.metrics.training.computed("apply", cpu_seconds)
        self.metrics.exchange.carried(carried)

    def _stepped(self, tokens: int, step_s: float, stall_s: float) -> None:
        for link in self.network.links:
            link.stepped()
        self.metrics.training.stepped(tokens=tokens, seconds=step_s, loss=self.loss)
        self.metrics.training.stalled(stall_s)
        self.metrics.exchange.contributions_unmerged(self._core.unmerged)

    def _report(self) -> Progress:
        """The latest progress."""
        return self._progress

    # ------------------------------------------------------------ helpers

    def _since(self, pending: Pending) -> int:
        """The learner's count of tokens where the work in a contribution begins."""
        return self._core.tokens - self._core.fragments[pending.fragment_id].tokens_since(self._core.tokens)

    def _read_loss(self, loss: Tensor | float | None, now: float) -> None:
        if isinstance(loss, Tensor):
            if loss.device.type != "cpu" and now - self._loss_read < LOSS_EVERY_S:
                return
            self._loss_read = now
            self.loss = float(loss.detach())
        elif loss is not None:
            self.loss = float(loss)
