"""A real shard, honest learners that train, and an attacker: each in a process of its own, and all end with the scene.

They are forked (tests/forks.py), so that a scene is there in seconds. The shard keeps its versions in a data
folder. It asks for a token that all share; where a row is about identities, it asks for certificates instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import ssl
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from attack import Attack, Credential, Evidence, Needs, Seen, Target
from honest_learners import Honest, Report

import forks
from certificates import Certificates
from processes import Shard, until
from secret_files import secret_file

SETTINGS: dict[str, Any] = {
    "sync.fragments": 4,
    "sync.sync_every": 8,
    "lease.lease_s": 4,
    "lease.heartbeat_s": 0.5,
}
WATCH_S = 0.02
GO_ON_S = 60.0
"""So long an attack may last until what was trained before it is in versions."""
TRAINS_S = 60.0
"""So long a learner may take from its join to its first merge."""
BACK_S = 100.0
"""The attacker's process is killed if it is not back so long after its time was over."""


class ShardProcess(Shard):
    """A shard that may be killed and started again, on its ports. Started when made."""

    def __init__(
        self, folder: Path, settings: Mapping[str, object], token: str | None,
        certificates: Certificates | None = None,
    ) -> None:  # fmt: skip
        """It asks for the token, if there is one, and for certificates of this authority, if there is one."""
        super().__init__("shard", {**settings, "shard.data_dir": folder / "shard"}, folder)
        self._token = token
        if token is not None:
            self.settings["security.token_file"] = secret_file(folder / "token", token)
        self._proof: ssl.SSLContext | None = None
        if certificates is not None:
            own = certificates.issue("shard/0")
            self.settings |= {"security.tls": own, "security.revoked": certificates.deny_list}
            self._proof = _shown(certificates.issue("admin/watch"))
        self.start()
        assert self.endpoints

    def status(self) -> dict[str, Any]:
        """What it says of itself to who may see it; empty where it does not answer."""
        try:
            return dict(json.loads(self.page("/status", 30.0)))
        except (OSError, ValueError):
            return {}

    def page(self, path: str, timeout_s: float) -> bytes:
        """One of its pages, shown to who has the token, or a certificate. Raises OSError."""
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        doors: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._proof is not None:
            doors.append(urllib.request.HTTPSHandler(context=self._proof))
        scheme = "http" if self._proof is None else "https"
        request = urllib.request.Request(f"{scheme}://{self.endpoints.http}{path}", headers=headers)
        with urllib.request.build_opener(*doors).open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())


class Striker(forks.Answering):
    """An attack under way, in a process of its own."""

    def __init__(self, attack: Attack, target: Target, log: Path, nice: int = 0) -> None:
        """`nice`: how far it steps back where others want the cores; 19 is furthest."""
        self._over = forks.context.Event()
        super().__init__("the attacker", log, _strike, attack.number, target, self._over, nice)
        self._cpu_s = 0.0

    def cpu_s(self) -> float:
        """Seconds of processor that it has used."""
        with contextlib.suppress(psutil.Error):  # it may have ended
            times = psutil.Process(self.pid).cpu_times()
            self._cpu_s = float(times.user + times.system)
        return self._cpu_s

    def end(self) -> Seen:
        self._over.set()
        try:
            if self._near.poll(BACK_S):
                seen: Seen = self._near.recv()
                return seen
            return Seen(error="it did not come back when its time was over")
        except EOFError:
            return Seen(error="its process has ended")
        finally:
            self.kill()


class Peak:
    """The largest RSS of a process while this is entered, in bytes."""

    def __init__(self, pid: int) -> None:
        self.before = self.most = 0
        with contextlib.suppress(psutil.Error):  # it may have ended, here and later
            self._process = psutil.Process(pid)
            self.before = self.most = self._process.memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rss", daemon=True)

    def __enter__(self) -> Self:
        if self.before:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.before:
            self._thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(psutil.Error):
            while not self._ended.wait(WATCH_S):
                self.most = max(self.most, self._process.memory_info().rss)


class Scene(contextlib.ExitStack):
    """The stage of one attack. A context manager that ends all its processes."""

    def __init__(self, attack: Attack, folder: Path) -> None:
        super().__init__()
        self.attack, self.folder = attack, folder
        folder.mkdir(parents=True, exist_ok=True)
        proven = attack.needs is Needs.CERTIFICATE
        self.token = None if proven else secrets.token_hex(16)
        self.certificates = Certificates(folder / "certs") if proven else None
        settings = SETTINGS | dict(attack.settings)
        self.shard = ShardProcess(folder, settings, self.token, self.certificates)
        self.callback(self.shard.kill)
        self.honest: Honest | None = None
        try:
            if not attack.fresh:
                self.honest = self.add([f"{n}" for n in _names(attack.learners)])
                self._settle()
        except BaseException:
            self.close()
            raise

    def add(self, names: list[str]) -> Honest:
        """Honest learners; they join while this goes on."""
        run = self.certificates
        tls = {} if run is None else {name: run.issue(f"learner/{name}") for name in names}
        made = Honest(names, self.shard.endpoints.grpc, self.folder, self.token, tls)
        self.callback(made.kill)
        return made

    @property
    def target(self) -> Target:
        credential = Credential(self.token if self.attack.needs is Needs.TOKEN else None)
        if self.certificates is not None:
            files = self.certificates.issue(f"learner/{credential.learner_id}")
            proof = [(files / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")]
            credential = Credential(None, *proof)
        where = self.shard.endpoints
        return Target(where.grpc, where.http, credential, victim=_names(1)[0], fresh=self.attack.fresh)

    def striker(self, nice: int = 0) -> Striker:
        made = Striker(self.attack, self.target, self.folder / "attacker.log", nice)
        self.callback(made.kill)
        return made

    def suffer(self) -> Evidence:
        """Let the attack happen, and collect what is known of it."""
        attack, shard = self.attack, self.shard
        said, status_before = len(shard.said()), shard.status()
        before = None if self.honest is None else self.honest.ask()
        late, restarted = None, ""
        with Peak(shard.pid) as peak:
            striker = self.striker()
            began = time.monotonic()
            _wait(began + attack.seconds)
            if attack.late:
                late = self._comes_late()
            went_on = self._goes_on(before, began) if before is not None else True
            kept_up = self._kept_up(before)
            seen = striker.end()
        ended = not shard.alive
        status = shard.status()
        if attack.restart:
            restarted = self._restart()
            late = None if restarted else self._comes_late()
        if attack.fresh:
            self.honest = self.add(_names(attack.learners))
            late = _trains(self.honest)
        new = shard.said()[said:]
        return Evidence(
            seen, peak.most - peak.before, new.count("\n"), new.count("Traceback"), before, self._report(), status,
            status_before, ended, went_on, kept_up, late, restarted,
        )  # fmt: skip

    def _report(self) -> Report | None:
        try:
            return None if self.honest is None else self.honest.ask()
        except AssertionError:
            return None

    def _goes_on(self, before: Report, began: float) -> bool:
        """Whether what was trained before the attack comes into versions while it is on."""
        while time.monotonic() < began + GO_ON_S:
            report = self._report()
            if report is None or report.stopped:
                return False
            if report.merged >= before.tokens:
                return True
            time.sleep(0.05)
        return False

    def _kept_up(self, before: Report | None) -> float:
        now, settings = self._report(), SETTINGS | dict(self.attack.settings)
        if before is None or now is None or now.steps == before.steps:
            return 1.0
        due = (now.steps - before.steps) * settings["sync.fragments"] / settings["sync.sync_every"]
        return (now.versions - before.versions) / due

    def _settle(self) -> None:
        """Wait until everybody trains, and what the shard needs for it has been allocated."""
        assert self.honest is not None
        assert not (why := _trains(self.honest)), why
        every = (SETTINGS | dict(self.attack.settings))["sync.sync_every"]
        versions = self.honest.ask().versions + max(4, 128 // every)
        until(lambda: self._report().versions >= versions, "rounds before the attack")  # type: ignore[union-attr]

    def _comes_late(self) -> str:
        return _trains(self.add(["late"]))

    def _restart(self) -> str:
        self.shard.kill()
        self.shard.start()
        try:
            until(lambda: self.shard.status().get("ready"), "the shard to be ready")
        except AssertionError as error:
            return f"{error}; it said: {self.shard.said()[-400:]}"
        return ""


def _names(count: int) -> list[str]:
    return ["ann", "ben", "cem", "dan", "eve", "fay", "gus", "hal"][:count]


def _trains(honest: Honest) -> str:
    """Wait until a learner's work is in a version: "", or why it is not."""
    deadline = time.monotonic() + TRAINS_S
    while time.monotonic() < deadline:
        try:
            report = honest.ask()
        except AssertionError as error:
            return str(error)
        if report.stopped:
            return report.stopped
        if report.merged > 0:
            return ""
        time.sleep(0.05)
    return "nothing of it was merged"


def _shown(files: Path) -> ssl.SSLContext:
    """For a caller of HTTP that shows this certificate."""
    proof = ssl.create_default_context(cafile=files / "ca.pem")
    proof.load_cert_chain(files / "cert.pem", files / "key.pem")
    proof.check_hostname = False  # it is called by its address
    return proof


def _wait(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _strike(number: int, target: Target, over: Any, nice: int, result: Connection, log: Path) -> None:
    forks.log_to(log)
    os.nice(nice)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    from table import ATTACKS

    try:
        seen = ATTACKS[number].strike(target, over.is_set)
    except Exception:
        seen = Seen(error=traceback.format_exc())
    result.send(seen)
    os._exit(0)  # threads of gRPC that still wait for a shard do not hold it up
