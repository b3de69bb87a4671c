"""A standby is promoted: its shard's machine is gone, or lives on behind a partition that heals later.

    python tests/faults/promote_standby.py --times 20 --seed 1 --still-lives

Two learners step all the while. Prints what was lost, how long it took, and every violation, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from steady import SETTINGS, Options, SteadyLearner

import forks
from diloco_simulator.verify.histories import gather, read_history
from diloco_simulator.verify.judge import violations
from processes import Shard, environment, until, versions


@dataclass
class Outcome:
    seed: int
    still_lives: bool
    versions_lost: int = 0
    """Announced and not held when the standby was promoted, over all fragments."""
    most_of_a_fragment: int = 0
    tokens_lost: int = 0
    """Merged into these, per fragment and at most."""
    contribute_after_s: float = 0.0
    """From the command until a version of the promoted shard holds work of a learner."""
    told: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


class Link:
    """A way to an address that can be cut: for whoever dials `address`, everything breaks, and nobody is there."""

    def __init__(self) -> None:
        self._to: tuple[str, int] | None = None
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def lead(self, address: str | None) -> None:
        """From now on, to there; None: it is cut."""
        self._to = None
        for one in [*self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if address is not None:
            host, _, port = address.rpartition(":")
            self._to = host, int(port)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._to is None:
                near.close()
                continue
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                self._open.add(one)
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.discard(one)


def promote_standby(folder: Path, seed: int, *, still_lives: bool) -> Outcome:
    outcome, chance = Outcome(seed, still_lives), random.Random(seed)
    links = {name: Link() for name in ("ann", "ben", "standby")}
    old = Shard("shard-0", given(folder, "old", SETTINGS), folder / "old")
    new = Shard(
        "shard-0", given(folder, "new", {**SETTINGS, "shard.standby_of": links["standby"].address}), folder / "new"
    )
    learners: dict[str, SteadyLearner] = {}
    try:
        old.start()
        for link in links.values():
            link.lead(old.endpoints.grpc)
        options = Options(history=str(folder / "learners"))
        for name in ("ann", "ben"):
            learners[name] = SteadyLearner(name, links[name].address, folder, options)
        new.start()
        until(lambda: min(versions(old.status()).values(), default=0) > 3, "versions")
        held_folder = folder / "new" / "data"
        until(lambda: len(held(held_folder)) == SETTINGS["sync.fragments"], "the standby to hold all fragments")
        goal = max(versions(old.status()).values()) + chance.randint(1, 4)
        until(lambda: max(versions(old.status()).values()) >= goal, "versions")
        time.sleep(chance.uniform(0, 0.05))  # the moment of the fault, not a wait for anything
        if still_lives:
            links["standby"].lead(None)
            links["ann"].lead(None)
        else:
            old.kill()
            shutil.rmtree(folder / "old" / "data")
        heard = announced(learners)
        began = time.monotonic()
        done = forks.run("diloco_deploy", "promote", str(held_folder), environment=environment(), timeout_s=60)
        assert done.returncode == 0, done.stderr
        outcome.told += done.stdout.splitlines()
        links["ann"].lead(new.endpoints.grpc)
        if not still_lives:
            links["ben"].lead(new.endpoints.grpc)
        cut = {i: v["version"] for i, v in until(lambda: status_of(new), "the promoted shard").items()}
        until(lambda: any(v["version"] > cut[i] for i, v in status_of(new).items()), "a version of the promoted shard")
        outcome.contribute_after_s = round(time.monotonic() - began, 2)
        restored = [line for line in history(folder, "new") if line["what"] == "restored"]
        by_fragment = {line["fragment"]: line["version"] for line in restored}
        lost = {i: max(0, max((v for _, v in heard[i]), default=0) - by_fragment.get(i, 0)) for i in heard}
        outcome.versions_lost, outcome.most_of_a_fragment = sum(lost.values()), max(lost.values())
        if still_lives:
            more = max(versions(old.status()).values()) + 2
            until(lambda: max(versions(old.status()).values()) >= more, "the old shard goes on with the other half")
            links["standby"].lead(old.endpoints.grpc)  # it heals
            code = old.exit_code()
            outcome.violations += [] if code == 4 else [f"the old shard ended with {code}"]
            links["ben"].lead(new.endpoints.grpc)
            old.start()
            code = old.exit_code()
            outcome.violations += [] if code == 3 else [f"the old folder served again: {code}"]
        outcome.told += [
            line for line in (old.said() + new.said()).splitlines() if "replaced" in line or "lost" in line
        ]
        goal = max(v["version"] for v in status_of(new).values()) + 3
        until(lambda: max(v["version"] for v in status_of(new).values()) >= goal, "more versions")
        for name in learners:
            until(lambda name=name: new.learner(name).get("merged", 0) > 0, f"work of {name}")  # type: ignore[misc]
        for learner in learners.values():
            found = learner.ask("pause")
            outcome.violations += found.mixed
            learner.kill()
        outcome.violations += two_bytes(folder)
        new.kill()
        outcome.violations += judged(folder)
        outcome.tokens_lost = max([0, *tokens_lost(new.said() + old.said())])
    finally:
        for process in (*learners.values(), old, new):
            process.kill()
        for link in links.values():
            link.close()
    return outcome


def given(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "shard.data_dir": folder / name / "data", "run.history": folder / name / "history"}


def held(folder: Path) -> set[str]:
    names = [path.name for path in folder.glob("fragment-*.safetensors")] if folder.is_dir() else []
    return {name[:13] for name in names}


def status_of(shard: Shard) -> dict[int, Any]:
    return {f["id"]: f for f in shard.status()["fragments"]} if shard.ready else {}


def announced(learners: dict[str, SteadyLearner]) -> dict[int, set[tuple[int, int]]]:
    found: dict[int, set[tuple[int, int]]] = {}
    for learner in learners.values():
        for fragment, heard in learner.ask().heard.items():
            found.setdefault(fragment, set()).update(heard)
    return found


def history(folder: Path, name: str) -> list[Any]:
    return list(read_history(folder / name / "history" / "shard-0.jsonl"))


def tokens_lost(said: str) -> list[int]:
    return [int(word.partition("=")[2]) for word in said.split() if word.startswith("tokens=")]


def two_bytes(folder: Path) -> list[str]:
    """Names of versions that shards announced, or learners applied, with different bytes."""
    found: dict[tuple[int, int, int], set[Any]] = {}
    for name in ("old", "new"):
        for line in history(folder, name):
            if line["what"] in ("announced", "restored") and line.get("checksum") is not None:
                found.setdefault((line["fragment"], line["epoch"], line["version"]), set()).add(line["checksum"])
    return [f"two bytes of {name}" for name, checksums in found.items() if len(checksums) > 1]


def judged(folder: Path) -> list[str]:
    lines = [("shard-0", history(folder, name)) for name in ("old", "new")]
    lines += [(path.stem, read_history(path)) for path in sorted((folder / "learners").glob("*.jsonl"))]
    found = gather(lines)
    excused = {(process.epoch, i) for process in found.shards["shard-0"] for i in range(SETTINGS["sync.fragments"])}
    return [str(violation) for violation in violations(found, excused=excused)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first (default 1)")
    parser.add_argument("--still-lives", action="store_true", help="the old shard is cut off, and comes back")
    args = parser.parse_args()
    bad = 0
    for seed in range(args.seed, args.seed + args.times):
        with tempfile.TemporaryDirectory() as folder:
            outcome = promote_standby(Path(folder), seed, still_lives=args.still_lives)
        print(json.dumps(asdict(outcome)), flush=True)
        bad += bool(outcome.violations)
    print(f"{args.times} times, {bad} with violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
