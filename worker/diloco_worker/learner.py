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

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from torch import Tensor
from torch.optim import Optimizer

from diloco_common.errors import (
    ConfigError,
    DilocoError,
    NotFinite,
    UnsupportedModel,
    VersionUndone,
    WrongCall,
)
from diloco_common.ports import Transport, World
from diloco_common.wire.messages import FrozenTensor, Progress
from diloco_worker.core.agreement import Diverging
from diloco_worker.core.connection import Caller
from diloco_worker.core.copies import is_schedule_free
from diloco_worker.core.device import on_its_way
from diloco_worker.core.events import Act, Answered, Failed, LastRounds, PushContribution, StepEnded, VersionApplied
from diloco_worker.core.fragment import Fate
from diloco_worker.core.learner import LearnerCore
from diloco_worker.core.replica import Replica
from diloco_worker.core.undone import CLAMPS, COPIES, FINDING
from diloco_worker.shell import process
from diloco_worker.shell.arguments import check_loss, check_seconds, counted
from diloco_worker.shell.boundary import Start, StepBoundary
from diloco_worker.shell.codec_thread import CodecThread
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.context import ConnectionContext
from diloco_worker.shell.council import Council
from diloco_worker.shell.ending import LEAVE_S, Ending, Finished, Finishing, Leaving, Patience
from diloco_worker.shell.optimizers import Amount, Compared, Following
from diloco_worker.shell.other_values import OtherValues, Values, write
from diloco_worker.shell.process import (
    Notice,
    OneThread,
    as_exit,
    as_one_line,
    one_thread,
    say_as_before,
    say_in_one_line,
)
from diloco_worker.shell.telemetry import LearnerTelemetry
from diloco_worker.shell.watch import ModelWatch
from diloco_worker.view import LearnerState, LearnerView

STEP_TIME_ALPHA = 0.1
"""Weight of the newest inner step in the moving average of step times."""
AWAY_S = 0.5
"""Seconds that a resumed learner waits for shards that do not answer. Then it trains without them."""
APPLY_S = 0.003
"""`step` spends this many seconds, or `APPLY_SHARE` of a step if that is longer, on versions that have arrived. It
applies at least one. The rest wait for the next step."""
APPLY_SHARE = 0.005
LOOK_S = 0.2
"""Seconds between two looks of a waiting learner, unless something arrives sooner."""
LEAVE_LEAST_S = 5.0
"""Least seconds that remain of `LEAVE_S` to leave, if the step after the warning took long."""
SETTLE_S = 5.0
"""Seconds for pushes in flight to be answered when the learner ends."""
HURRY_S = 0.5
"""Like `SETTLE_S`, after Ctrl-C."""
NO_TOKENS_STEPS = 3
"""Steps without a token before the learner warns."""


class Background(Protocol):
    """Runs the connections: a thread in production, the virtual event loop in the simulator."""

    def start(self, connections: Connections) -> None:
        """Start running them."""

    def post(self, acts: Sequence[Act]) -> None:
        """Queue acts for the connections, in order. Never waits."""

    def stop(self, settle_s: float) -> None:
        """Make the connections leave and end them; pushes in flight get `settle_s` seconds. May be repeated."""


class Learner(LearnerView):
    """One learner of a run, made by `join`. As a context manager it leaves the run at the end."""

    def __init__(
        self, boundary: StepBoundary, connections: Connections, background: Background, context: ConnectionContext,
        watch: ModelWatch | None = None,
    ) -> None:  # fmt: skip
        """`watch`: checks that the model is still the one that joined; None: nothing can replace it."""
        super().__init__(boundary, connections, context.telemetry, context.index)
        self.step_time_s = 0.0
        """Moving average, in seconds."""
        self._home = process.Home()
        self.one_thread = OneThread()
        self._background = background
        self._codec = context.codec
        self._inbox = context.inbox
        self._clock = context.world.clock
        self._began = self._step_ended = self._clock()
        self._loss: float | None = None
        self._loss_coming: tuple[Tensor, Callable[[], bool]] | None = None
        self._finishing = Finishing(boundary, connections, context.council)
        self._leaving = Leaving(boundary, connections, context.council)
        self._watch = watch
        self._others = OtherValues(boundary.replica, self._settle)
        self._diverging = Diverging(len(list(connections)))
        self._is_alone = context.council.is_alone
        self._following: Following | None = None
        self._notice: Notice | None = None
        self.compared = Compared(None)
        """Compares what the optimizers train with what is shared."""
        self.pull_average: Callable[[], Mapping[str, Tensor]] | None = None
        """Pulls the average of the versions, by name; it waits. None: this learner has several processes."""
        self._is_leaving = False
        self._says_no_tokens = True  # whether every step of this process did
        self._finished: Finished | None = None
        self._has_left: bool | None = None
        self._steps_told = boundary.figures().inner_step

    # ------------------------------------------------------------ joining

    def start(self) -> None:
        self._began = self._clock()
        self._background.start(self.connections)

    def begin(self) -> bool:
        """Apply what has arrived, and return whether training can begin. Call until true; never waits.

        It can once the model holds a version of every fragment; a resumed learner needs only those that it can get.
        Raises what `step` raises.
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
        self._step_ended = self._clock()
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
            ConfigError: `tokens` and `samples` are not one whole number.
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
        began = self._clock()
        step_s = began - self._step_ended
        self._step_ended = began
        self.step_time_s += (STEP_TIME_ALPHA if self.step_time_s else 1.0) * (step_s - self.step_time_s)
        self._read_loss(loss)
        self._boundary.stepped(amount)
        self._warn_of_no_tokens()
        self.compared.stepped(self.telemetry.log)
        acts = self._cross(max(APPLY_S, APPLY_SHARE * self.step_time_s))
        core = self._core
        progress = Progress(
            core.inner_step, core.tokens, self._loss, self.step_time_s, counts_samples=is_samples,
            inner=self.compared.inner,
        )  # fmt: skip
        acts.append(StepEnded(progress, amount, step_s, self._clock() - began))
        self._post(acts)
        self._heed()

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
            raise ConfigError("this learner follows an optimizer already: call remove() of what follow() gave first")
        following = Following(self, optimizer, tokens, samples, self.telemetry.log)
        if is_schedule_free(optimizer) and not self._boundary.replica.has_copies:
            following.remove()
            raise VersionUndone(
                f"{type(optimizer).__name__} is schedule-free, and would draw the parameters back to a copy that "
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
        self._post(self._cross(math.inf))
        self._heed()

    def global_values(self, average: bool = False) -> AbstractContextManager[None]:
        """In a `with` block, the model holds the newest global values that were applied, to evaluate, sample or save.

        After the block, even if it raised, the model is as before, bit for bit. It needs memory for one more copy of
        the shared parameters and of all buffers. Inside the block nothing is applied or contributed, and `step` raises.
        In an island all ranks enter it alike. Raises WrongCall inside another block, and ModelChanged.

        `average`: the parameters get the average of the versions (`outer.average`) in float32, pulled from the shards
        now; this waits for the network. Raises NoAverage if the run keeps none, CannotConnect, and UnsupportedModel in
        an island.
        """
        self._home.check(self.learner_id)
        if average:
            if self.pull_average is None:
                raise UnsupportedModel("an island cannot take the average yet: `diloco pull --average` writes it")
            self._others.check()
            return self.values(self.pull_average())
        return self._others.instead("global_values()", self._finishing.write)

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
        first hands over its work as `leave` does, and gets the latest values. Values arrive in the encoding that the
        run sends (`sync.pull`, bfloat16 by default); `diloco pull` writes float32. Frozen and private tensors stay.

        If the run is not over and some of this learner's work is in no version, the model keeps the trained values and
        a warning says why. `regardless`: load the global values anyway. A second call does nothing, except that
        `regardless` may load them then.

        Returns what became of this process's work. It is true if versions hold all of it and the last versions came
        within `wait_s` seconds; None: 25 for the work and 60 for the versions, but only 10 for a shard that nobody can
        reach. For a version that did not come, the learner uses the one it had, and the log names the fragment. Raises
        ModelChanged, and what `step` raises.
        """
        check_seconds("wait_s", wait_s)
        if self._finished is None:
            missing = self._end(self._finishing, partial(self.hand_over, how=self._finishing), wait_s)
            self._finished = self._finishing.outcome(missing, regardless=regardless)
            if self._finished.is_global:
                self._finishing.write()
            self._say_finished(self._finished)
            self.close()
            say_as_before()
        elif regardless and not self._finished.is_global:
            self._finishing.write()
            self._finished = replace(self._finished, is_global=True)
        return self._finished

    def _say_finished(self, finished: Finished) -> None:
        log, lost = self.telemetry.log, f"{finished.tokens_unmerged} of {finished.tokens}"
        if not finished.is_global:
            log.warning(
                "some of this learner's work is not in the run: the model keeps it, and "
                "learner.finish(regardless=True) loads the global values", code="NOT_MERGED", tokens_unmerged=lost,
                why=finished.why,
            )  # fmt: skip
        elif finished.work != "all":
            log.warning(
                "the model holds the global values, which lack some of this learner's work", code="NOT_MERGED",
                tokens_unmerged=lost, why=finished.why,
            )  # fmt: skip
        elif finished.why:
            log.warning("not everything is of the last version", why=finished.why)

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
        if self._finished is not None:
            return bool(self._finished)
        if self._has_left is not None:
            return self._has_left
        if self._notice is not None:
            self._notice.heed()
        before = self._boundary.figures().tokens_unmerged
        missing = self._end(self._leaving, self.hand_over, wait_s)
        self._has_left = not missing
        if missing:
            self.telemetry.log.warning("some of this learner's work is in no version", why=missing)
        self.close()
        if self._boundary.is_leave_asked:
            share = 1 - self._boundary.figures().tokens_unmerged / before if before else 1.0
            merged = (
                f"{share:.0%} of what it alone had is merged, but not {missing}" if missing else "all of it is merged"
            )
            raise as_exit(f"{self.learner_id} has left the run after {self.inner_step} steps; {merged}")
        return not missing

    def hand_over(self, waited_s: float, wait_s: float | None, how: Ending | None = None) -> tuple[bool, str]:
        """After a `poll`: ask for the missing rounds. Returns what `Ending.look` returns."""
        if self.core is not None and not self._boundary.shards.have_stopped:
            self._post([LastRounds(self.core.last_rounds)])
        return (how or self._leaving).look(waited_s, wait_s)

    def state_dict(self) -> dict[str, Any]:
        """The counters and identity for `join(state=...)`, as plain values for any checkpoint.

        Save it with the model and the optimizer, between two steps. In an island all ranks get the same state; if a
        rank dies during the call, the others raise IslandBroken.
        """
        self._home.check(self.learner_id)
        caller = self.telemetry.caller
        merged = self.tokens_merged
        return LearnerState(caller.run_id, caller.learner_id, self.index, *self._boundary.trained(), merged).as_dict()

    def status(self) -> dict[str, Any]:
        """The JSON that /status serves. May be called in any thread."""
        return self.telemetry.status(self._boundary.pulse, self.connections.figures())

    def stop(self) -> None:
        """Make `done` true. May be called from a signal handler."""
        self._boundary.ask_stop()

    def listen(self) -> None:
        """Treat SIGTERM as the notice to leave from now on, unless the process already handles it."""
        self._notice = Notice(self._boundary.ask_leave, self._patience_s)

    def _patience_s(self) -> float | None:
        """Seconds that the notice waits for the step to end: its usual time, if the rest of the warning allows it.
        None: forever, since the ranks of an island end a step together."""
        if not self._boundary.is_alone:
            return None
        left_s = self.telemetry.step_left_s
        return LEAVE_LEAST_S + (left_s if left_s < LEAVE_S - 2 * LEAVE_LEAST_S else 0.0)

    @property
    def hung_s(self) -> float:
        """Seconds without the end of an inner step after which the learner counts as hung: with `http=`, /healthz
        answers 503. May be set; 0: never."""
        return self.telemetry.hung_s

    @hung_s.setter
    def hung_s(self, seconds: float) -> None:
        check_seconds("hung_s", seconds)
        self.telemetry.hung_s = seconds

    def close(self, settle_s: float | None = None) -> None:
        """Leave the run; pushes in flight get `settle_s` seconds (None: 5). May be repeated. In a forked child it does
        nothing."""
        check_seconds("settle_s", settle_s)
        if not self._home.is_here:
            return
        process.left(self.telemetry.caller.run_id, self.learner_id)
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
            if self._notice is not None:
                self._notice.end(is_heeded=self._is_leaving and self._boundary.is_leave_asked)

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
                # SIGTERM often is the cause of the error: the workers of a DataLoader got it, too.
                self._heed()
        finally:
            self.close(HURRY_S if kind is KeyboardInterrupt else None)
        if kind is KeyboardInterrupt and self._home.is_here:
            raise as_one_line(f"{self.learner_id} has left the run after {self.inner_step} steps") from None

    # ------------------------------------------------------------ helpers

    def _warn_of_no_tokens(self) -> None:
        """Warn once, after some steps, if no step had tokens: none of this work is ever merged then."""
        if not self._says_no_tokens:
            return
        steps, tokens = self._boundary.trained_here()
        self._says_no_tokens = not tokens and steps < NO_TOKENS_STEPS
        if not tokens and not self._says_no_tokens:
            self.telemetry.log.warning(
                "every step so far reported no tokens, so none of this work is merged; count the tokens of the batch",
                code="NO_TOKENS", steps=steps,
            )  # fmt: skip

    def _heed(self) -> None:
        """If SIGTERM came, hand over the work and end the process."""
        if self._boundary.is_leave_asked and not self._is_leaving:
            if (asked_at := self._boundary.leave_asked_at) is not None:  # None: another rank got it
                self._leaving.usual_s = max(LEAVE_LEAST_S, LEAVE_S - (self._clock() - asked_at))
            self.leave()

    def _end(self, how: Ending, look: Callable[[float, float | None], tuple[bool, str]], wait_s: float | None) -> str:
        self._check_not_ended()
        self._others.check()
        self._is_leaving |= how is self._leaving
        if self._watch is not None:
            self._watch.check_in_place()
        return self._wait(how.waits, look, wait_s)

    def _wait(self, what: str, look: Callable[[float, float | None], tuple[bool, str]], wait_s: float | None) -> str:
        """Poll until `look` returns true (`Ending.look`). Returns what is missing, as text."""
        began = self._clock()
        patience = Patience(self.telemetry.log, what, began)
        while True:
            self.poll()
            waited_s = self._clock() - began
            is_over, missing = look(waited_s, wait_s)
            if is_over:
                patience.over(began + waited_s)
                return missing
            patience.still(missing or "a round that holds work of this learner", began + waited_s)
            self._inbox.wait(LOOK_S)

    def _settle(self) -> None:
        """Wait until nobody reads the parameters. Raises ModelChanged."""
        if self._watch is not None:
            self._watch.check()
            self._watch.check_in_place()
        if self._boundary.replica.reads_later:
            self._codec.wait()

    def _check_not_ended(self) -> None:
        self._home.check(self.learner_id)
        if self.state in ("done", "stopped"):
            say_in_one_line()  # `finish` restored the previous hook
            raise WrongCall(
                f"{self.learner_id} has left the run already (by finish, by close, or at the end of `with`); to train "
                "on, join again with state=learner.state_dict()"
            )

    @property
    def core(self) -> LearnerCore | None:
        """The learner's decisions so far; None until the model is cut."""
        return self._boundary.core

    @property
    def _core(self) -> LearnerCore:
        core = self._boundary.core
        assert core is not None, "call `begin` until it returns True"
        return core

    def _cross(self, apply_s: float) -> list[Act]:
        acts = self._boundary.cross(apply_s)
        core = self.core
        if core is not None and core.inner_step > self._steps_told:  # in an island, decisions lag one boundary behind
            self._steps_told = core.inner_step
            self.telemetry.stepped(core.inner_step, core.tokens)
        if not self.telemetry.readiness[0]:
            is_ready, missing = self._boundary.readiness()
            objections = "" if is_ready else self.connections.objections
            self.telemetry.readiness = is_ready, f"{missing} ({objections})" if objections else missing
        return acts

    def _post(self, acts: list[Act]) -> None:
        """Start the codec thread's work, and pass all acts to the connections at once: each wakeup of the network
        thread may take the processor away. Raises the error of `Failed`."""
        self.telemetry.record(acts)
        error: DilocoError | None = None
        diverged: DilocoError | None = None
        for act in acts:
            match act:
                case PushContribution():
                    fragment = self._core.manifest.fragments[act.contribution.fragment_id]
                    self._codec.begin(act.contribution, fragment.encoding(self._core.policy.push_encoding))
                case Answered():
                    shard_index = self._core.manifest.fragments[act.fragment_id].shard_index
                    answered = self._diverging.answered(act.fragment_id, shard_index, act.round, act.answer)
                    diverged = diverged or answered
                case VersionApplied(fate=Fate.MERGED):
                    self._diverging.merged(act.fragment_id)
                case Failed():
                    error = act.error
        if acts:
            self._background.post(tuple(acts))
        if error is None and diverged is not None and not self._begin_anew():
            error = diverged
        if error is not None:
            self.telemetry.state = "stopped"
            raise error

    def _begin_anew(self) -> bool:
        """If values became NaN or infinite: take the global ones, and clear the optimizers. Returns whether it did.

        The ranks of an island would have to do this at the same step, so an island ends instead.
        """
        if not self._is_alone or not self._diverging.begin_anew():
            return False
        self._settle()
        self._finishing.write()
        optimizers = [*self.compared.optimizers.values()]
        for optimizer in optimizers:
            optimizer.state.clear()
        moments = "fresh moments" if optimizers else "moments as they are: give join(optimizer=) for fresh ones"
        self.telemetry.log.warning(
            f"values were not finite: it goes on with those of the run, and {moments}", code=NotFinite.code,
            times=self._diverging.times_anew,
        )  # fmt: skip
        return True

    def _read_loss(self, loss: Tensor | float | None) -> None:
        """Keep the loss. From an accelerator it arrives a step or more later: nothing waits for the device."""
        if not isinstance(loss, Tensor):
            self._loss = self._loss if loss is None else float(loss)
            return
        if self._loss_coming is None:
            self._loss_coming = on_its_way(loss.detach())
        value, is_there = self._loss_coming
        if is_there():
            self._loss, self._loss_coming = float(value), None


def make_learner(
    replica: Replica, addresses: Sequence[str], caller: Caller, dial: Callable[[str], Transport], world: World,
    background: Background, telemetry: LearnerTelemetry, start: Start, *, index: int | None = None,
    frozen: Sequence[FrozenTensor] = (), watch: ModelWatch | None = None, council: Council | None = None,
    after_version: Callable[[], object] | None = None, site: str = "",
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
    return Learner(boundary, connections, background, context, watch)
