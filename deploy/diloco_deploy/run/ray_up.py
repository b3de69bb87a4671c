"""`diloco up --on ray`: one cluster on the nodes of a Ray cluster, from the first actor to the exported model.

Each shard and each worker is an actor in a placement group that spreads over the nodes (ray_member.py). Ray recreates
an actor when it or its node dies. The driver starts the actors, reports events, and ends the actors. Ray keeps them
only as long as the driver lives.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

from diloco_common.errors import EXIT_INTERRUPTED, CannotConnect, ConfigError, DilocoError
from diloco_common.settings import Settings
from diloco_common.settings_loader import save
from diloco_common.trust.identity import subject_of
from diloco_common.wire.addresses import Role
from diloco_common.wire.calls import END_S, SAY_EVERY_S, SETTLE_S
from diloco_demo.cli import declared_digest
from diloco_deploy import EVERY_S, LOOK_S
from diloco_deploy.cluster.asking import Asker, fetch_all
from diloco_deploy.cluster.members import SeenMember
from diloco_deploy.cluster.model import Cluster
from diloco_deploy.cluster.roll_call import ClusterRecord, MemberRecord, addresses_in
from diloco_deploy.run.folder import ClusterFolder, Outputs, anchored
from diloco_deploy.run.placement import settle
from diloco_deploy.run.ray_member import MemberReport, OnRay, Plan, shard_files
from diloco_deploy.run.supervisor import Action, Interrupts
from diloco_deploy.run.up import check_cluster
from diloco_deploy.trust.authority import make_authority, open_authority
from diloco_deploy.trust.tending import OBSERVER, OwnCertificates


def bring_up_on_ray(settings: Settings, outputs: Outputs, *, fresh: bool = False) -> int:
    """Run a cluster on Ray until its token budget is reached. Returns the exit code of the command.

    `cluster.folder` must be visible to all nodes. Continues a run in it, if there is one; `fresh` deletes it. Raises
    CannotConnect if there is no Ray cluster, ConfigError (also if Ray is not installed), and InUse.
    """
    check_cluster(settings)
    ray = _connected()  # before `Interrupts`: Ray sets a handler for SIGTERM
    settings = anchored(settings)
    files = ClusterFolder(settings.cluster.folder.resolve(), outputs)
    with files.owned(), Interrupts() as interrupts:
        settle(files)
        if files.prepare(settings, fresh=fresh):
            _say(f"continuing the run in {files.folder} (--fresh starts over)")
        save(settings, files.settings)
        files.runs("ray")
        if not settings.security.insecure:
            make_authority(files.certs, settings.run.id, today := datetime.now(UTC))
            open_authority(files.certs).issue(subject_of(settings.run.id, OBSERVER), today)
        run = _RayRun(ray, settings, files, interrupts)
        try:
            return run.run()
        finally:
            run.close()
            files.clear_addresses()


class _RayRun:
    def __init__(self, ray: Any, settings: Settings, files: ClusterFolder, interrupts: Interrupts) -> None:
        self._ray, self._settings, self._files, self._interrupts = ray, settings, files, interrupts
        self._groups: list[Any] = []
        self._actors: dict[str, Any] = {}
        self._asked: dict[Any, str] = {}  # pending call of `look` -> member
        self._next_look: dict[str, float] = {}
        self._looks: dict[str, MemberReport] = {}
        self._heard_of: set[str] = set()  # members that answered since the workers ended
        self._failed: dict[str, str] = {}  # member whose last look failed -> why
        self._say_at = 0.0
        self._began = time.monotonic()
        self._record = ClusterRecord.of(settings)
        self._record.write(files.folder)  # `diloco status` now shows it as starting
        self._observer = None if settings.security.insecure else OwnCertificates.observer_in(files.folder)

    def run(self) -> int:
        cluster = self._settings.cluster
        a_worker = {"CPU": max(1.0, self._settings.worker.threads)}
        if cluster.worker_gpus:
            a_worker["GPU"] = cluster.worker_gpus
        if not (
            self._place("shard", cluster.shards, {"CPU": 1.0}) and self._place("worker", cluster.workers, a_worker)
        ):
            return self._interrupted()
        workers = [name for name in self._actors if name.startswith("worker")]
        while not self._is_over(workers):
            if self._interrupts.count:
                return self._interrupted()
            self._look_after_all()
            self._say_how_it_goes()
            self._interrupts.wait(LOOK_S)
        self._stop("worker")
        if not self._wait_for_shards():
            return self._interrupted()
        code = self._evaluate()
        self._stop("shard")
        return code

    def close(self) -> None:
        """Remove the actors; processes that still run are told to end."""
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors.values():
            self._ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)

    # ------------------------------------------------------------ phases

    def _place(self, role: Role, count: int, resources: dict[str, float]) -> bool:
        """Start all members of a kind, spread over the nodes. False: interrupted."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([resources] * count, strategy="SPREAD")
        self._groups.append(group)
        ready, needs = group.ready(), " and ".join(f"{share:g} {name}" for name, share in resources.items())
        while not self._ray.wait([ready], timeout=SAY_EVERY_S)[0]:
            _say(f"waiting for room on the Ray cluster: {count} x {needs} for the {role}s")
            if self._interrupts.count:
                return False
        for index in range(count):
            plan = self._plan(role, index)
            self._note(plan.name, "starting")
            self._actors[plan.name] = (
                self._ray.remote(_Actor)
                .options(
                    num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0),
                    max_restarts=-1, max_task_retries=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                )
                .remote(plan)
            )  # fmt: skip
        return True

    def _plan(self, role: Role, index: int) -> Plan:
        settings = self._settings
        return Plan(
            f"{role}-{index}", role, index, self._files.folder, settings.cluster.shards,
            settings.run.model or declared_digest(settings),
            not settings.security.insecure, settings.run.history,
        )  # fmt: skip

    def _is_over(self, workers: list[str]) -> bool:
        """Over once one worker has ended, since the budget is reached then. Dead workers need not return."""
        over = {name: self._looks[name].over for name in workers if name in self._looks}
        if all(over.get(name) in (Action.FAIL, Action.LOST) for name in workers):
            raise DilocoError("all workers have failed; their last messages are above")
        here = [name for name in workers if name in self._looks and self._looks[name].is_up]
        return Action.ENDED in over.values() and not here

    def _wait_for_shards(self) -> bool:
        """Look after the shards until all are up. False: interrupted."""
        shards = [name for name in self._actors if name.startswith("shard")]
        self._heard_of.clear()  # shards were not checked while the workers ended
        while not all(name in self._heard_of and self._looks[name].is_up for name in shards):
            if self._interrupts.count:
                return False
            self._look_after_all("shard")
            self._interrupts.wait(LOOK_S)
        return True

    def _look_after_all(self, kind: str = "") -> None:
        """Ask all members, or those of a kind, for their state, and handle the answers. Lost members are skipped."""
        now = time.monotonic()
        lost = {name for name, found in self._looks.items() if found.over is Action.LOST}
        idle = self._actors.keys() - self._asked.values() - lost
        for name in idle:
            if name.startswith(kind) and now >= self._next_look.get(name, 0.0):
                self._asked[self._actors[name].look.remote()] = name
        if not self._asked:
            return
        for done in self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0.1)[0]:
            name = self._asked.pop(done)
            self._next_look[name] = now + EVERY_S
            errors = self._ray.exceptions
            try:
                found = self._ray.get(done)
            except errors.ActorUnavailableError:
                continue  # a RayActorError too, but it may come back
            except errors.RayActorError:
                self._is_dead(name)
            except errors.RayTaskError as error:  # such as a network folder that failed once
                if (why := str(error).strip().rpartition("\n")[2]) != self._failed.get(name):
                    _say(f"{name}: looking after it failed ({why}); it is retried")
                self._failed[name] = why
            else:
                self._failed.pop(name, None)
                self._heard(name, found)

    def _is_dead(self, name: str) -> None:
        if name.startswith("shard"):
            self._note(name, "lost")
            raise DilocoError(f"{name}: its actor died and will not be restarted, so part of the model is unavailable")
        _say(f"{name}: its actor died and will not be restarted")
        self._looks[name] = MemberReport("", 0, False, Action.LOST, 0, ())
        self._note(name, "lost")

    def _heard(self, name: str, found: MemberReport) -> None:
        before = self._looks.get(name)
        if before is not None and before.life != found.life:
            _say(f"{name}: its node or its actor died; Ray has recreated it on {found.host} (life {found.life})")
        for event in found.events:
            _say(event)
        self._looks[name] = found
        self._heard_of.add(name)
        ended = {Action.ENDED: "ended", Action.FAIL: "lost", Action.LOST: "lost"}
        self._note(name, "up" if found.is_up else ended[found.over] if found.over else "starting", found)
        if found.over is Action.FAIL and name.startswith("shard"):
            raise DilocoError(f"{name} failed with exit code {found.exit_code}, so part of the model is unavailable")

    def _note(self, name: str, process: str, found: MemberReport | None = None) -> None:
        """Record a member's state for `diloco status`, if it changed."""
        before = self._record.members.get(name)
        life, why = (0, "") if found is None else (found.life, found.events[-1] if found.events else "")
        if before is None or (before.process, before.restarts) != (process, life):
            role: Role = "shard" if name.startswith("shard") else "worker"
            self._record.members[name] = MemberRecord(
                role=role, process=process, since=time.time(), why=why, restarts=life
            )
            self._record.write(self._files.folder)

    def _say_how_it_goes(self) -> None:
        now = time.monotonic()
        if now < self._say_at:
            return
        self._say_at = now + SAY_EVERY_S
        answers = fetch_all(addresses_in(self._files.folder), 1.0, Asker(self._observer))
        if not answers:
            return  # nothing is up yet
        totals = Cluster({name: SeenMember(name, each["role"], "up", each) for name, each in answers.items()}).totals()
        loss = "-" if totals.loss is None else f"{totals.loss:.3f}"
        _say(f"tokens merged {totals.tokens_merged:,} of {totals.tokens_budget:,}, loss {loss}")

    def _evaluate(self) -> int:
        _say("training is over; evaluating the global model on held-out text")
        proof = [] if self._observer is None else [f"--set=security.tls={self._observer}"]
        shards = shard_files(self._files.folder, self._settings.cluster.shards)
        child = subprocess.Popen(
            [
                sys.executable, "-m", "diloco_demo", "evaluate", f"--settings={self._files.settings}",
                f"--shards={shards}", *proof, f"--export={self._files.model}", f"--out={self._files.evaluation}",
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while child.poll() is None and not self._interrupts.count:
                self._look_after_all("shard")  # the evaluation reads the model from them
                self._interrupts.wait(LOOK_S)
        finally:
            child.terminate()  # in case it still runs
            code = child.wait()
        if self._interrupts.count:
            return EXIT_INTERRUPTED
        if code == 0:
            found = json.loads(self._files.evaluation.read_text(encoding="utf-8"))
            _say(f"loss on held-out text {found['eval_loss_first']:.3f} -> {found['eval_loss_final']:.3f}")
            _say(f"the model: {self._files.model}, logs: {self._files.logs}")
        return code

    def _interrupted(self) -> int:
        _say("interrupted: workers leave, then shards end; every announced version is on disk")
        for role in ("worker", "shard"):
            self._stop(role)
        return EXIT_INTERRUPTED

    def _stop(self, role: str) -> None:
        """Ask all members of a kind to end. `close` removes those that do not."""
        asked = [actor.stop.remote(END_S) for name, actor in self._actors.items() if name.startswith(role)]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=END_S + SETTLE_S)


class _Actor(OnRay):
    """A member on the node that Ray chose."""

    def __init__(self, plan: Plan) -> None:
        import ray

        super().__init__(plan, ray.util.get_node_ip_address())


def _connected() -> Any:
    """Raises ConfigError, CannotConnect."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed here: pip install 'decoupled-diloco-ops[ray]', on every node of the cluster"
        ) from None
    try:
        ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        raise CannotConnect(
            "there is no Ray cluster here; start one with `ray start --head`, or name one with RAY_ADDRESS"
        ) from None
    return ray


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
