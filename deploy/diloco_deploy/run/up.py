"""`diloco up`: one cluster on this machine, from the first process to the exported model.

Starts shards first, then workers. At the end it evaluates the model while the shards still hold it. `supervisor.py`
decides what a child's death means, `members.py` records it, and `terminal.py` shows the state.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco_common.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, DataError
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_common.wire.addresses import dialable, write_json
from diloco_common.wire.calls import END_S
from diloco_deploy import ASK_S, EVERY_S, LOOK_S
from diloco_deploy.cluster.asking import Asker, Poller, fetch_all
from diloco_deploy.report import Report, make_report, summary
from diloco_deploy.run.folder import ClusterFolder, Outputs, anchored, shown
from diloco_deploy.run.members import EVALUATE, Children, Members, Programs, names, take_wish
from diloco_deploy.run.placement import settle
from diloco_deploy.run.supervisor import Action, Exit, Hanging, Interrupts, Supervisor
from diloco_deploy.terminal import display_for
from diloco_deploy.trust.tending import OBSERVER, own_certificates
from diloco_deploy.web.command import PageThread

_TAIL_LINES = 8


def bring_up(settings: Settings, outputs: Outputs, programs: Programs | None = None, *, fresh: bool = False) -> int:
    """Run a cluster until its token budget is reached. Returns the exit code of the command.

    Continues a run in the folder, if there is one; `fresh` deletes it. Raises ConfigError, DataError and InUse.
    """
    check_cluster(settings)
    settings = anchored(settings)
    files = ClusterFolder(settings.cluster.folder, outputs, settings.shard.data_dir)
    with files.owned(), Supervisor() as supervisor, Interrupts() as interrupts:
        settle(files)
        is_resumed = files.prepare(settings, fresh=fresh)
        save(settings, files.settings)
        files.runs("here")
        run = LocalRun(settings, files, programs or Programs(), supervisor, interrupts)
        try:
            return run.run(is_resumed=is_resumed)
        finally:
            run.close()
            files.clear_addresses()


def check_cluster(settings: Settings) -> None:
    """Raises ConfigError if the quorum exceeds the workers, and DataError if there is no such data."""
    quorum, workers = settings.sync.quorum, settings.cluster.workers
    if quorum != "all" and quorum > workers:
        raise ConfigError(
            f"sync.quorum ({quorum}) is above cluster.workers ({workers}), so no round could ever close; "
            "lower the quorum or start more workers"
        )
    source = settings.data.source
    if source != "stdlib" and not Path(source).expanduser().exists():
        raise DataError(f"data.source: there is no file or folder {source!r}; give one, or 'stdlib'")


class _Signalled(Exception):
    """A signal asked us to end."""


class _ChildFailed(Exception):
    """A child failed, and a restart would not help. Holds its `Exit`."""


class LocalRun:
    """The shards and workers of one `diloco up`. Everything here runs on the main thread."""

    def __init__(
        self, settings: Settings, files: ClusterFolder, programs: Programs, supervisor: Supervisor,
        interrupts: Interrupts,
    ) -> None:  # fmt: skip
        self._settings, self._files = settings, files
        self._supervisor, self._interrupts = supervisor, interrupts
        self._started_at = time.monotonic()
        self._members = Members(settings, files.folder)
        self._watch = self._members.watch
        self._display = display_for(Console())
        self._certificates = own = own_certificates(settings, files.certs)
        self._children = Children(settings, files, programs, own)
        self._shards, self._workers = self._children.shards, self._children.workers
        self._poller = Poller(asker=Asker(own.of(OBSERVER) if own else None))
        self._page = PageThread(files.folder, settings)
        self._ended: set[str] = set()
        self._leaving: dict[str, float] = {}  # workers told to leave -> when they are killed
        self._lost: set[str] = set()
        self._http: dict[str, str] = {}  # name -> address of /status
        self._hanging = Hanging()
        self._next_sample = 0.0
        self._has_loss = False
        self._report: Report = {}  # filled when training is over

    def run(self, *, is_resumed: bool) -> int:
        self._poller.start()
        if is_resumed:
            self._display.tell(f"continuing the run in {self._files.folder} (--fresh starts over)")
        if self._certificates is not None:
            folder = self._files.certs
            self._display.tell(f"each process has a certificate; more: diloco certs issue learner/ID --folder {folder}")
        self._display.tell(self._page.start())
        try:
            self._train()
            wall_s = time.monotonic() - self._started_at
            self._gather(is_over=True)
            # Made before the evaluation pulls, so that the report counts only the traffic of training.
            self._report = self._make_report(wall_s)
            found = self._evaluate()
            self._report |= {key: found.get(key) for key in ("eval_loss_first", "eval_loss_final")} | {
                "evaluation": found
            }
            self._stop_all()
        except _Signalled:
            return self._interrupted()
        except _ChildFailed as failure:
            return self._failed(*failure.args)
        write_json(self._files.report, self._report)
        self._display.close()
        results = {"model": self._files.model, "report": self._files.report, "logs": self._files.logs}
        print("\n" + summary(self._report, results, self._files.folder), flush=True)
        return EXIT_OK

    def close(self) -> None:
        """Stop the display, the page and the polling, whatever happened."""
        self._display.close()
        self._page.stop()
        self._poller.stop()

    # ------------------------------------------------------------ phases

    def _train(self) -> None:
        self._watch.doing = "starting shards"
        for index, name in enumerate(self._shards):
            self._members.expect(name, "shard")
            self._supervisor.start(self._children.shard(index))
        self._until(lambda: self._children.shards_are_up)
        self._watch.doing = "starting workers"
        for index, name in enumerate(self._workers):
            self._start_worker(index, name)
        self._members.train(True)
        try:
            self._until(self._training_is_over)
        finally:
            self._members.train(False)

    def _training_is_over(self) -> bool:
        # Once one worker has ended, the budget is reached. Dead workers need not return.
        left = set(self._workers) - self._ended - self._lost
        return bool(self._ended) and left <= self._supervisor.waiting()

    def _gather(self, *, is_over: bool) -> None:
        """Collect the last status of each worker from its file, and of each shard by asking again.

        `is_over`: ask until the shards say that the run is done, since an answer may be cached for some seconds.
        """
        for name in self._workers:
            try:
                status = json.loads(self._files.final_status(name).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue  # killed before it could write; its last answer stays
            if isinstance(status, dict):
                self._watch.heard(name, status, time.monotonic())
        shards = {name: self._http[name] for name in self._shards if name in self._http}
        ends = time.monotonic() + ASK_S
        while True:
            for name, status in fetch_all(shards, ASK_S, self._poller.asker).items():
                self._watch.heard(name, status, time.monotonic())
            if not is_over or self._watch.cluster.totals().done or time.monotonic() >= ends:
                return
            self._interrupts.wait(LOOK_S)

    def _evaluate(self) -> dict[str, Any]:
        self._display.tell("training is over; evaluating the global model on held-out text")
        # Do not start dead workers again: the rest of the run needs only the shards.
        self._supervisor.stop(self._supervisor.waiting() & set(self._workers), 0.0)
        self._supervisor.start(self._children.evaluation())
        self._until(self._evaluation_is_over)
        try:
            found: dict[str, Any] = json.loads(self._files.evaluation.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._display.tell(f"the evaluation wrote no result; its log is {self._children.log(EVALUATE)}")
            return {}
        return found

    def _evaluation_is_over(self) -> bool:
        self._watch.doing = "evaluating the model"
        with contextlib.suppress(OSError, ValueError, KeyError):  # not written yet
            self._watch.doing += f", {json.loads(self._files.evaluated.read_text(encoding='utf-8'))['share']:.0%}"
        return EVALUATE in self._ended

    def _stop_all(self) -> None:
        # Workers first, so their last pushes still find the shards.
        self._stop([*self._workers, *self._leaving, EVALUATE])
        self._stop(self._shards)

    def _stop(self, names: Sequence[str]) -> None:
        """Ask children to end; kill those that take too long, or all of them on a second interrupt."""
        started = set(names) & self._supervisor.names()
        for name in self._supervisor.stop(started, END_S, hurry=lambda: self._interrupts.count >= 2):
            self._display.tell(f"{name} did not end by itself and was killed")

    def _interrupted(self) -> int:
        self._display.tell("interrupted: workers and shards are ending; interrupt again to kill them at once")
        wall_s = time.monotonic() - self._started_at
        self._stop([*self._workers, *self._leaving])
        if self._interrupts.count < 2:
            self._gather(is_over=False)
        self._stop_all()
        write_json(self._files.report, self._report or self._make_report(wall_s, interrupted=True))
        self._display.close()
        when = "while the model was evaluated" if self._report else "before the token budget was reached"
        print(
            f"interrupted after {wall_s:.0f} s, {when}; no model was exported.\n"
            f"the report so far: {shown(self._files.report)}, logs: {shown(self._files.logs)}\n"
            f"every announced version is on disk; to continue: diloco resume {shown(self._files.folder)}",
            flush=True,
        )
        return EXIT_INTERRUPTED

    def _failed(self, failed: Exit) -> int:
        self._display.tell(f"stopping the cluster because of {failed.name}")
        self._stop_all()
        if self._report:  # only the evaluation failed
            write_json(self._files.report, self._report)
        self._display.close()
        print(f"diloco: {failed.name} {failed.verdict.why}; the end of {failed.log}:", file=sys.stderr)
        with contextlib.suppress(OSError):
            for line in failed.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]:
                print(f"  {line}", file=sys.stderr)
        sys.stderr.flush()
        return failed.verdict.exit_code

    # ------------------------------------------------------------ the loop

    def _until(self, is_over: Callable[[], bool]) -> None:
        while True:
            now = time.monotonic()
            if self._certificates is not None:
                self._certificates.renew(now)
            self._look_after_children(now)
            self._kill_who_stays(now)
            self._kill_who_hangs(now)
            self._look_for_wish()
            self._listen(now)
            self._display.show(self._watch.snapshot(now), now)
            if self._interrupts.count:
                raise _Signalled
            if is_over():
                return
            self._interrupts.wait(LOOK_S)

    def _look_after_children(self, now: float) -> None:
        for exit in self._supervisor.look(now):
            self._http.pop(exit.name, None)
            verdict = exit.verdict
            if exit.name in self._leaving:
                self._has_left(exit.name)
                continue
            if verdict.action is Action.FAIL:
                raise _ChildFailed(exit)
            if verdict.action is Action.ENDED:
                self._ended.add(exit.name)
            else:
                self._display.tell(f"{exit.name} {verdict.why}")
            if exit.kind != "job":
                states = {Action.ENDED: "ended", Action.AGAIN: "died", Action.LOST: "lost"}
                self._members.process_is(exit.name, states[verdict.action], verdict.why)
            if verdict.action is Action.LOST:
                self._lost.add(exit.name)
                if self._lost >= set(self._workers):
                    raise _ChildFailed(exit)
        for name in self._supervisor.start_due(now):
            if name in self._workers or name in self._shards:
                self._members.expect(name, "shard" if name in self._shards else "worker")
            self._display.tell(f"{name} started again")
        self._find_addresses()

    def _look_for_wish(self) -> None:
        """Carry out a request of `diloco scale` during training."""
        if not self._members.are_training or self._leaving or (wanted := take_wish(self._files.folder)) is None:
            return
        before, after = set(self._workers), set(names("worker", wanted))
        self._children.scale(wanted)
        self._workers = self._children.workers
        for name in sorted(before - after):
            self._leaving[name] = time.monotonic() + END_S
            if name in self._supervisor.waiting() | self._ended | self._lost:
                self._has_left(name)
            else:
                self._supervisor.dismiss(name)
        for index, name in enumerate(self._workers):
            if name not in before:
                self._start_worker(index, name)
        self._members.want_workers(wanted)
        self._settings = self._settings.model_copy(
            update={"cluster": self._settings.cluster.model_copy(update={"workers": wanted})}
        )
        save(self._settings, self._files.settings)  # `diloco resume` starts with this number
        self._display.tell(f"workers: {len(before)} -> {wanted}")

    def _kill_who_stays(self, now: float) -> None:
        """Kill workers that were told to leave and took too long."""
        for name, until in self._leaving.items():
            if now > until:
                self._leaving[name] = float("inf")
                self._supervisor.signal(name, signal.SIGKILL)
                self._display.tell(f"{name} did not end by itself and was killed")

    def _kill_who_hangs(self, now: float) -> None:
        """Kill processes that hang. They are restarted like those that died."""
        found = self._hanging.look(self._http, now)
        if not found:
            return
        # They may only be slow on a busy machine: ask these alone again.
        answers = fetch_all({name: self._http[name] for name in found}, ASK_S, self._poller.asker)
        for name, why in found.items():
            if not answers.get(name, {"hung": True}).get("hung"):
                continue
            self._display.tell(f"{name} hangs, and is killed: {why}")
            self._supervisor.signal(name, signal.SIGKILL)

    def _start_worker(self, index: int, name: str) -> None:
        if self._certificates is not None:
            self._certificates.include(f"learner/{name}")
            self._certificates.renew(time.monotonic())
        self._ended.discard(name)
        self._lost.discard(name)
        self._members.expect(name, "worker")
        self._supervisor.start(self._children.worker(index))

    def _has_left(self, name: str) -> None:
        self._leaving.pop(name, None)
        self._supervisor.forget(name)
        self._members.left(name)

    def _find_addresses(self) -> None:
        names = self._supervisor.names() - {EVALUATE}
        for name in names - self._http.keys():
            if (found := self._supervisor.endpoints(name)) is None:
                continue
            self._http[name] = dialable(found.http)
            self._members.process_is(name, "up")
            self._children.found(name, found)
        self._poller.ask(self._http)

    def _listen(self, now: float) -> None:
        for name, status in self._poller.take().items():
            self._hanging.heard(name, now, is_hung=bool(status.get("hung")))
            for event in self._watch.heard(name, status, now):
                self._display.tell(event)
        if self._members.are_training:
            for words in self._watch.wrong(now):
                self._display.tell(words)
        if now >= self._next_sample:
            self._next_sample = now + EVERY_S
            self._watch.sample_loss()
        snapshot = self._watch.snapshot(now)
        if not self._has_loss and (loss := snapshot.cluster.totals().loss) is not None:
            self._has_loss = True
            self._watch.doing = "training"
            self._display.tell(f"first loss {loss:.3f} after {snapshot.elapsed_s:.1f} s")

    # ------------------------------------------------------------ results

    def _make_report(self, wall_s: float, *, interrupted: bool = False) -> Report:
        return make_report(self._watch.cluster, self._settings, wall_s=wall_s, evaluation=None, interrupted=interrupted)
