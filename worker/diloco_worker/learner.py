"""`Learner`: the object that a training loop holds.

    with diloco_worker.join("ps-0:50051,ps-1:50051", model) as learner:
        for batch in loader:
            loss = model(batch).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            learner.step(tokens=batch.numel(), loss=loss)
            if learner.done:
                break
        learner.finish()
    model.save_pretrained("model")

Everything here runs in the training thread. Between two inner steps, `step` takes contributions (one pass over the
fragment) and adds arrived versions to the model (one addition of a prepared difference). It never waits. `StepBoundary`
decides what happens; the codec thread encodes, and `Background` runs the connections.

A contribution is fixed when `step` or `poll` returns. Until the next call the loop may put other values into the
parameters (averaged ones for an evaluation, say), if it puts the trained ones back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import NoReturn, Self

from torch import Tensor
from torch.optim import Optimizer

from diloco_common.errors import ConfigError, UnsupportedModel, VersionUndone, WrongCall
from diloco_common.ports import Transport, World
from diloco_common.wire.calls import HURRY_S, SETTLE_S
from diloco_common.wire.messages import FrozenTensor, Progress
from diloco_worker.core.connection import Caller
from diloco_worker.core.copies import is_schedule_free
from diloco_worker.core.replica import Replica
from diloco_worker.core.undone import CLAMPS, COPIES, FINDING
from diloco_worker.shell.arguments import check_loss, check_seconds, counted
from diloco_worker.shell.boundary import Start, StepBoundary
from diloco_worker.shell.codec_thread import CodecThread, ConnectionContext
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.council import Council
from diloco_worker.shell.crossing import Background, Crossing
from diloco_worker.shell.ending import Ending, Finished
from diloco_worker.shell.optimizers import Amount, Compared, Following
from diloco_worker.shell.other_values import OtherValues, Values, write
from diloco_worker.shell.process import OneThread, as_one_line, left, one_thread, say_in_one_line
from diloco_worker.shell.telemetry import LearnerTelemetry
from diloco_worker.shell.watch import ModelWatch
from diloco_worker.view import LearnerView

AWAY_S = HURRY_S
"""Seconds that a resumed learner waits for shards that do not answer. Then it trains without them."""


class Learner(LearnerView):
    """One learner of a run, made by `join`. As a context manager it leaves the run at the end."""

    def __init__(
        self, boundary: StepBoundary, connections: Connections, background: Background, context: ConnectionContext,
        watch: ModelWatch | None = None, compared: Compared | None = None,
        pull_average: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """`watch`: checks that the model is still the one that joined; None: nothing can replace it. `pull_average`:
        pulls the average of the versions, by name; it waits. None: this learner has several processes."""
        super().__init__(boundary, connections, context.telemetry, context.index)
        self.compared = compared or Compared(None)
        """Compares what the optimizers train with what is shared."""
        self.one_thread = OneThread()
        self._background = background
        self._codec = context.codec
        self._inbox = context.inbox
        self._clock = context.world.clock
        self._began = self._clock()
        self._watch = watch
        self._pull_average = pull_average
        self._others = OtherValues(boundary.replica, self._check_model)
        self._crossing = Crossing(boundary, connections, background, context, self.compared, self._check_model)
        self._ending = Ending(boundary, connections, self._crossing, context, self)
        self._following: Following | None = None

    # ------------------------------------------------------------ joining

    def start(self) -> None:
        self._began = self._clock()
        self._background.start(self.connections)

    def begin(self) -> bool:
        """Apply what has arrived, and return whether training can begin. Call until true; never waits.

        Training can begin once the model holds a version of every fragment; a resumed learner needs only those that it
        can get. Raises what `step` raises.
        """
        if self.state == "training":
            return True
        self.poll()
        is_ready, missing = self.telemetry.readiness
        if not is_ready:
            if not self._boundary.is_resumed or self._clock() - self._began <= AWAY_S:
                return False
            if not self._boundary.has_what_can_be_had(self.connections.shards_up):
                return False
            self.telemetry.log.event("training without a shard", why=missing)
            self._boundary.begin_without()
        self.telemetry.trains()
        self._crossing.begin()
        return True

    # ------------------------------------------------------------ for the training loop

    @one_thread
    def step(
        self, tokens: int | None = None, loss: Tensor | float | None = None, *, samples: int | None = None
    ) -> None:
        """Report the end of an inner step. Call it after optimizer.step(); never waits.

        Give the step's `tokens`, or its `samples` if it has none (images, episodes, graphs). All learners of a run must
        count the same way; settings such as `run.tokens` then use that unit.

        Raises:
            Superseded: another process joined with this learner id.
            Refusal: a shard refuses this learner for good.
            ManifestMismatch: a shard that was away when training began belongs to another run.
            ConfigError: not exactly one of `tokens` and `samples` is given, or it is not a whole number.
            WrongCall: `loss` is not a number; a block of `global_values` or `values` is open; another thread is inside
                a call of this learner; the learner has left the run; or this process was forked from the learner's.
            ModelChanged: the parameters were replaced, or overwritten by load_state_dict, after the model joined.
            NotFinite: the model keeps producing NaN, even after it took the global values.
        """
        self._check_not_ended()
        self._others.check()
        if self._watch is not None:
            self._watch.check()
        if self._boundary.replica.laid.check():
            self.telemetry.log.warning(FINDING, code=VersionUndone.code, do=f"{COPIES}; {CLAMPS}")
        amount, is_samples = counted(tokens, samples)
        check_loss(loss)
        self._crossing.step(amount, loss, counts_samples=is_samples)
        self._ending.heed()

    def follow(
        self, optimizer: Optimizer, *, tokens: Amount | None = None, samples: Amount | None = None
    ) -> Following:  # fmt: skip
        """Call `step` after each step of this optimizer, for training loops inside a library.

        Give the tokens or samples per step, or a function that returns them. Of several optimizers, follow the one that
        ends a step of the loop. optimizer.step() then raises what `step` raises. After the end of the run the loop
        continues and the log warns; end the loop by a callback that checks `done`. Call `remove()` on the result, or
        `close`, to stop following. Raises ConfigError, WrongCall, and VersionUndone for a schedule-free optimizer that
        is not among `masters`.
        """
        self._check_not_ended()
        if self._following is not None and not self._following.is_removed:
            raise ConfigError("this learner already follows an optimizer: first remove() what follow() returned")
        following = Following(self, optimizer, tokens, samples, self.telemetry.log)
        if is_schedule_free(optimizer) and not self._boundary.replica.has_copies:
            following.remove()
            raise VersionUndone(
                f"{type(optimizer).__name__} is schedule-free, and would pull the parameters back to a copy that "
                "gets no versions: join(masters=optimizer)"
            )
        self._following = following
        self.compared.has(optimizer)
        return following

    @one_thread
    def poll(self, wait_s: float = 0.0) -> None:
        """Apply versions that have arrived, and send what rounds ask for, between two steps.

        `step` does this too; call it where the next step is far away, as in a long evaluation. Waits up to `wait_s`
        seconds for something to arrive. Raises what `step` raises.
        """
        check_seconds("wait_s", wait_s)
        self._check_not_ended()
        self._others.check()
        if wait_s > 0:
            self._inbox.wait(wait_s)
        self._crossing.poll()
        self._ending.heed()

    def global_values(self, average: bool = False) -> AbstractContextManager[None]:
        """In a `with` block, the model holds the newest global values that were applied, to evaluate, sample or save.

        After the block, even if it raised, the model is as before, bit for bit. It needs memory for one more copy of
        the shared parameters and of all buffers. Inside the block nothing is applied or contributed, and `step` raises.
        In an island all ranks must enter it. Raises WrongCall inside another block, and ModelChanged.

        `average`: the parameters get the average of the versions (`outer.average`) in float32, pulled from the shards
        now; this waits for the network. Raises NoAverage if the run keeps none, CannotConnect, and UnsupportedModel in
        an island.
        """
        self._home.check(self.learner_id)
        if average:
            if self._pull_average is None:
                raise UnsupportedModel("an island cannot take the average yet: `diloco pull --average` writes it")
            self._others.check()
            return self.values(self._pull_average())
        return self._others.instead("global_values()", self._boundary.take_global)

    def values(self, values: Values) -> AbstractContextManager[None]:
        """In a `with` block, the model holds your own values (averaged ones, a best checkpoint), as in `global_values`.

        Give names and tensors as in a state_dict, or a module; whatever they do not name stays. Tensors are converted
        to the model's dtype. Raises WrongCall if names or shapes do not fit, and UnsupportedModel under FSDP2.
        """
        self._home.check(self.learner_id)
        pairs = self._others.beside(values)
        return self._others.instead("values()", partial(write, pairs), [theta for theta, _ in pairs])

    @one_thread
    def restore(self, values: Values) -> None:
        """Continue training from these values (a best checkpoint, say), given as to `values`, between two steps.

        Work that the run has merged stays merged. The run sees one inner step that ends at these values: the next
        contributions carry the difference, with this learner's weight, so the global values move toward them and reach
        them only if this learner trains alone. Raises what `values` raises, and WrongCall.
        """
        self._check_not_ended()
        self._others.for_good(values)

    @one_thread
    def finish(self, wait_s: float | None = None, *, regardless: bool = False) -> Finished:
        """End this learner's training and load the global model into the user's module.

        Waits for the last version of every fragment, logs what it waits for, replaces all local values, and leaves the
        run. If the run has reached its budget, these values are final and equal in all learners. Otherwise the learner
        first hands over its work as `leave` does, and gets the latest values. They are what learners train on:
        bfloat16, unless `sync.pull` is float32; `diloco pull` writes float32. Frozen and private tensors stay.

        If the run is not over and some of this learner's work is in no version, the model keeps the trained values and
        a warning says why. `regardless`: load the global values anyway. A second call does nothing, except that
        `regardless` may load them then.

        Returns the fate of this process's work. It is true if versions hold all of it and the last versions arrived
        within `wait_s` seconds; None: 25 for the work and 60 for the versions, but only 10 for a shard that nobody can
        reach. If a version did not arrive, the learner keeps the one it had, and the log names the fragment. Raises
        ModelChanged, and what `step` raises.
        """
        check_seconds("wait_s", wait_s)
        return self._ending.finish(wait_s, regardless=regardless)

    @one_thread
    def leave(self, wait_s: float | None = None) -> bool:
        """Leave the run and hand over all work: a round is opened for what was trained since the last contributions.

        The model stays as it is. This takes about one step and one push of the slowest other learner, since the round
        asks all of them. SIGTERM does the same and then ends the process (see `join`). A second call does nothing.

        Returns whether versions hold all work within `wait_s` seconds; None: 25, but only 10 for a shard that nobody
        can reach. The log says what is in no version; a contribution already sent still counts if its round closes.
        Raises ModelChanged, and what `step` raises.
        """
        check_seconds("wait_s", wait_s)
        return self._ending.leave(wait_s)

    def hand_over(self, waited_s: float, wait_s: float | None) -> tuple[bool, str]:
        """After a `poll`, one check of `leave`, for callers that wait themselves: whether to stop; what is missing."""
        return self._ending.hand_over(waited_s, wait_s)

    def listen(self) -> None:
        """Treat SIGTERM as the notice to leave from now on, unless the process already handles it."""
        self._ending.listen()

    def close(self, settle_s: float | None = None) -> None:
        """Leave the run; pushes in flight get `settle_s` seconds (None: 5). May be repeated. In a forked child it does
        nothing."""
        check_seconds("settle_s", settle_s)
        if not self._home.is_here:
            return
        left(self.telemetry.caller.run_id, self.learner_id)
        if self.state != "stopped":
            self.telemetry.state = "done" if self._boundary.shards.have_stopped else "stopped"
            self.telemetry.ended()
        if self._watch is not None:
            self._watch.end()
        if self._following is not None:
            self._following.remove()
        try:
            self._background.stop(SETTLE_S if settle_s is None else settle_s)
        finally:
            self._codec.close()
            self._ending.over()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles. Raises WrongCall."""
        raise WrongCall(
            f"the learner {self.learner_id} cannot be copied or pickled: save learner.state_dict() in its place, and "
            "keep the learner out of what is copied (a model, a dataset of a DataLoader's workers)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            is_error = kind is not None and kind is not KeyboardInterrupt
            if is_error and self._home.is_here and self.state not in ("done", "stopped"):
                # SIGTERM is often the cause of the error: the workers of a DataLoader got it, too.
                self._ending.heed()
        finally:
            self.close(HURRY_S if kind is KeyboardInterrupt else None)
        if kind is KeyboardInterrupt and self._home.is_here:
            raise as_one_line(f"{self.learner_id} has left the run after {self.inner_step} steps") from None

    # ------------------------------------------------------------ helpers

    def check_end(self) -> None:
        """Raises WrongCall and ModelChanged if the learner cannot end now."""
        self._check_not_ended()
        self._others.check()
        if self._watch is not None:
            self._watch.check_in_place()

    def _check_model(self) -> None:
        """Raises ModelChanged unless it is the one that joined."""
        if self._watch is not None:
            self._watch.check()
            self._watch.check_in_place()

    def _check_not_ended(self) -> None:
        self._home.check(self.learner_id)
        if self.state in ("done", "stopped"):
            say_in_one_line()  # `finish` restored the previous hook
            raise WrongCall(
                f"{self.learner_id} has left the run already (by finish, by close, or at the end of `with`); to train "
                "on, join again with state=learner.state_dict()"
            )


def make_learner(
    replica: Replica, addresses: Sequence[str], caller: Caller, dial: Callable[[str], Transport], world: World,
    background: Background, telemetry: LearnerTelemetry, start: Start, *, index: int | None = None,
    frozen: Sequence[FrozenTensor] = (), watch: ModelWatch | None = None, council: Council | None = None,
    after_version: Callable[[], object] | None = None, site: str = "", compared: Compared | None = None,
    pull_average: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Learner:  # fmt: skip
    """A learner in any world, with its parts. Nothing is dialed before `start`.

    Args:
        dial: returns the transport to the shard at an address, and sends nothing yet.
        background: runs the connections.
        index: the learner's number in an earlier process.
        frozen: tensors that must be equal in all learners.
        watch: checks that the model is still the one that joined; None: nothing can replace it.
        council: the processes of this learner; None: this one alone.
        after_version: called after versions were written to the model.
        site: the learner's place, for mirrors.
        compared, pull_average: as in `Learner`.
    """
    council = council or Council()
    telemetry.holds_all = council.is_alone
    telemetry.born(start.inner_step, start.tokens)
    codec = CodecThread(replica.device, world, telemetry, start.tokens_seen)
    context = ConnectionContext(
        caller, tuple(replica.specs), dial, world, council, codec, telemetry, frozen=tuple(frozen), ties=replica.ties,
        index=index, site=site,
    )  # fmt: skip
    connections = Connections(addresses, Progress(start.inner_step, start.tokens), context)
    boundary = StepBoundary(replica, addresses, council, lambda: connections.pulse, world, start, after_version)
    telemetry.figures = boundary.figures
    return Learner(boundary, connections, background, context, watch, compared, pull_average)
