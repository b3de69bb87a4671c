"""SIGKILL of a shard again and again under load, at random moments: faults.md 5.

    python tests/faults/kill_shard.py --times 100 --seed 1

Two learners step all the while. After each death the files of the shard are compared with what learners were told,
and at the end every token that learners take for merged with what the versions say. Prints what happened as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from processes import http_get, sets, until, versions
from steady import History, Identity, QuickShard, SteadyLearner, digest

from diloco_common.endpoints import Endpoints, read_address
from diloco_server.storage.filesystem import Disk
from diloco_server.storage.version import StoredVersion
from diloco_server.storage.version_file import read_version, version_names

FRAGMENTS = 4
LEARNERS = ("ann", "ben")
SETTINGS: dict[str, Any] = {
    "sync.fragments": FRAGMENTS,
    "sync.sync_every": 4,
    "sync.quorum": 1,
    "sync.grace": 0.01,
    "lease.lease_s": 4,
    "lease.heartbeat_s": 0.5,
}


@dataclass
class Outcome:
    """What was found; the lists name every violation."""

    seed: int
    kills: int = 0
    versions: int = 0
    inner_steps: int = 0
    announced: int = 0
    """Versions that learners heard of, over all fragments."""
    compared: int = 0
    """Files whose bytes were compared with what learners had decoded of that version."""
    tokens_merged: int = 0
    lost_versions: list[str] = field(default_factory=list)
    other_bytes: list[str] = field(default_factory=list)
    double_counted: list[str] = field(default_factory=list)
    """Fragments in which learners and versions do not agree on what was merged: counted twice, or lost."""
    stopped: list[str] = field(default_factory=list)
    longest_step_gap_s: float = 0.0
    seconds: float = 0.0

    @property
    def violations(self) -> list[str]:
        return self.lost_versions + self.other_bytes + self.double_counted + self.stopped


def kill_shard(folder: Path, times: int, seed: int) -> Outcome:
    """Run two learners and one shard in `folder`, and kill the shard so many times."""
    began, outcome, chance = time.monotonic(), Outcome(seed), random.Random(seed)
    address_file, data = folder / "shard.json", folder / "data"
    where: list[Endpoints] = []  # of the first life

    def arguments() -> list[str]:
        ports = [f"--listen={where[0].grpc}", f"--http={where[0].http}"] if where else []
        return [*ports, f"--address-file={address_file}", *sets({**SETTINGS, "shard.data_dir": data})]

    shard = QuickShard(arguments, folder / "shard.log")
    learners: list[SteadyLearner] = []
    try:
        where.append(until(lambda: read_address(address_file), "the shard to be up"))
        learners += [SteadyLearner(name, where[0].grpc, folder / f"{name}.log") for name in LEARNERS]
        until(lambda: all(learner.ask("report").at for learner in learners), "the learners to train")
        for _ in range(times):
            steps = [learner.ask("report").steps for learner in learners]
            goal = max(versions(_status(where[0])).values(), default=0) + chance.randint(1, 3)
            until(lambda goal=goal: max(versions(_status(where[0])).values()) >= goal, "versions")  # type: ignore[misc]
            time.sleep(chance.uniform(0, 0.03))  # the moment of the fault, not a wait for anything
            shard.kill()
            outcome.kills += 1
            kept = intact(data)
            histories = [learner.ask("report") for learner in learners]
            compare(kept, histories, outcome)
            shard.start()
            until(lambda: _is_ready(where[0]), "the shard to serve again")
            for learner, before in zip(learners, steps, strict=True):
                if not learner.alive or learner.ask("report").steps <= before:
                    outcome.stopped.append(f"{learner.name} after kill {outcome.kills}")
        settle(where[0], learners, outcome)
    finally:
        for process in (*learners, shard):
            process.kill()
    for name in ("shard", *LEARNERS):
        said = (folder / f"{name}.log").read_text()
        outcome.lost_versions += [line for line in said.splitlines() if "versions lost" in line]
        outcome.stopped += [f"{name}: {line}" for line in said.splitlines() if "Traceback" in line]
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def intact(folder: Path) -> dict[int, list[StoredVersion]]:
    """What a shard's folder holds of each fragment, newest first. Raises VersionDamaged."""
    disk = Disk(folder)
    names = {i: version_names(i, disk.names()) for i in range(FRAGMENTS)}
    return {i: [read_version(disk, name)[1] for name in found] for i, found in names.items()}


def compare(kept: dict[int, list[StoredVersion]], histories: list[History], outcome: Outcome) -> None:
    """Every announced version is in the files, or a later one; and its bytes are what learners hold."""
    for fragment_id in range(FRAGMENTS):
        heard: set[Identity] = set().union(*(h.heard.get(fragment_id, ()) for h in histories))
        found = {(stored.record.epoch, stored.record.version): stored for stored in kept[fragment_id]}
        newest = max(found, default=(-1, -1))
        outcome.lost_versions += [f"fragment {fragment_id}: {h}, kept is {newest}" for h in heard if h > newest]
        numbers = sorted(version for _, version in heard)
        if len(numbers) != len(set(numbers)):
            outcome.lost_versions.append(f"fragment {fragment_id}: two versions of one number: {sorted(heard)}")
        for identity, stored in found.items():
            held = {h.held.get((fragment_id, *identity)) for h in histories} - {None}
            outcome.compared += bool(held)
            if held - {digest(stored.values.theta.bfloat16().float())}:
                outcome.other_bytes.append(f"fragment {fragment_id} version {identity}")
    for history in histories:
        outcome.other_bytes += history.mixed


def settle(where: Endpoints, learners: list[SteadyLearner], outcome: Outcome) -> None:
    """Let the learners stand still until all hold the same versions, and compare what was merged."""
    for learner in learners:
        learner.ask("pause")

    def still() -> tuple[dict[str, Any], list[History]] | None:
        status = _status(where)
        histories = [learner.ask("pause") for learner in learners]
        here = {f["id"]: (f["epoch"], f["version"]) for f in status["fragments"]}
        return (status, histories) if all(h.at == here for h in histories) else None

    status, histories = until(still, "the learners to hold the last versions")
    for fragment in status["fragments"]:
        learners_say = sum(h.merged_tokens[fragment["id"]] for h in histories)
        if fragment["tokens_merged"] != learners_say:
            outcome.double_counted.append(
                f"fragment {fragment['id']}: {fragment['tokens_merged']} tokens merged, learners say {learners_say}"
            )
    outcome.tokens_merged = status["tokens_merged"]
    outcome.versions = sum(versions(status).values())
    outcome.announced = len({(f, i) for h in histories for f, heard in h.heard.items() for i in heard})
    outcome.inner_steps = sum(h.steps for h in histories)
    outcome.longest_step_gap_s = round(max(h.longest_gap_s for h in histories), 3)


def _status(where: Endpoints) -> dict[str, Any]:
    return dict(json.loads(http_get(where.http, "/status")[1]))


def _is_ready(where: Endpoints) -> bool:
    try:
        return bool(_status(where)["ready"])
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100, help="how often the shard is killed (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default 1)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_shard(Path(folder), args.times, args.seed)
    print(json.dumps(asdict(outcome), indent=2))
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
