"""SIGKILL of a shard again and again under load, at random moments: reliability.md 5.

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

sys.path.insert(0, str(Path(__file__).parents[1]))

from steady import SETTINGS, History, Identity, SteadyCluster, digest

from diloco_server.storage.filesystem import Disk
from diloco_server.storage.version_file import StoredVersion, read_version, version_names
from processes import until, versions


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
    with SteadyCluster(folder) as cluster:
        cluster.add("ann", "ben")
        (shard,) = cluster.shards
        for _ in range(times):
            steps = [history.steps for history in cluster.ask()]
            goal = max(versions(shard.status()).values(), default=0) + chance.randint(1, 3)
            until(lambda goal=goal: max(versions(shard.status()).values()) >= goal, "versions")  # type: ignore[misc]
            time.sleep(chance.uniform(0, 0.03))  # the moment of the fault, not a wait for anything
            shard.kill()
            outcome.kills += 1
            compare(intact(cluster.folder / shard.name), cluster.ask(), outcome)
            shard.start()
            until(lambda: shard.ready, "the shard to serve again")
            for learner, before in zip(cluster.learners.values(), steps, strict=True):
                if not learner.alive or learner.ask().steps <= before:
                    outcome.stopped.append(f"{learner.name} after kill {outcome.kills}")
        outcome.double_counted = cluster.disagreements()
        status, histories, said = shard.status(), cluster.ask(), cluster.said()
    outcome.lost_versions += [line for line in said.splitlines() if "versions lost" in line]
    outcome.stopped += [line for line in said.splitlines() if "Traceback" in line]
    outcome.tokens_merged = status["tokens_merged"]
    outcome.versions = sum(versions(status).values())
    outcome.announced = len({(f, i) for h in histories for f, heard in h.heard.items() for i in heard})
    outcome.inner_steps = sum(h.steps for h in histories)
    outcome.longest_step_gap_s = round(max(h.longest_gap_s for h in histories), 3)
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def intact(folder: Path) -> dict[int, list[StoredVersion]]:
    """What a shard's folder holds of each fragment, newest first. Raises VersionDamaged."""
    disk = Disk(folder)
    names = {i: version_names(i, disk.names()) for i in range(SETTINGS["sync.fragments"])}
    return {i: [read_version(disk, name)[1] for name in found] for i, found in names.items()}


def compare(kept: dict[int, list[StoredVersion]], histories: list[History], outcome: Outcome) -> None:
    """Every announced version is in the files, or a later one; and its bytes are what learners hold."""
    for fragment_id in range(SETTINGS["sync.fragments"]):
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
