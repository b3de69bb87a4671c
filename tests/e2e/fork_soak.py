"""Children of a learner and of a shard, three hundred in each way; again after a shard has died and come back.

    make forks        # an hour on two cores; fewer: make forks FORKS="--times 20"

Prints a table, and ends with 1 where a child died. The ways: forking.py. `test_e2e_forks.py` takes two of each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import forking

from processes import LocalCluster, environment

SETTINGS = {"sync.fragments": 2, "sync.sync_every": 2, "sync.cadence": "forking:cadence"}
Counts = dict[str, tuple[int, int]]
"""Way -> children, deaths."""


SHARD = "a shard, os.fork"


def soak(folder: Path, ways: Sequence[str], times: int) -> Iterator[Counts]:
    """Counts of a learner in these ways, and of the shards that it has; then the same again, once a shard has died
    and come back."""
    os.environ[forking.COUNTED] = str(counted := folder.with_suffix(".children"))
    counted.touch()
    with LocalCluster(folder, SETTINGS, keeps=True) as cluster:
        cluster.start(shards=2, workers=[])
        shards = ",".join(shard.endpoints.grpc for shard in cluster.shards)
        command = [sys.executable, forking.__file__, shards, str(times), *ways]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=folder
        ) as learner:
            assert learner.stdin is not None
            assert learner.stdout is not None
            try:
                yield counts(learner.stdout, counted)
                cluster.shards[0].kill()
                cluster.shards[0].start()
                assert cluster.shards[0].status()
                learner.stdin.write("again\n")
                learner.stdin.close()
                yield counts(learner.stdout, counted)
                assert learner.wait() == 0, f"the parent ended with {learner.returncode}"
            finally:
                learner.kill()


def counts(said: Iterable[str], counted: Path) -> Counts:
    line = next((line for line in said if line.startswith('{"')), "")
    assert line, "the parent died"
    letters = counted.read_text()
    counted.write_text("")
    found = {way: (children, deaths) for way, (children, deaths) in json.loads(line).items()}
    return {**found, SHARD: (len(letters), letters.count("x"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=300, help="children in each way")
    parser.add_argument("--ways", nargs="+", default=[*forking.WAYS, *forking.TRAINERS], help="of these ways alone")
    given = parser.parse_args()
    deaths = 0
    with TemporaryDirectory() as folder:
        for number, way in enumerate(given.ways):
            whens = iter(("", "after a shard came back"))
            for found in soak(Path(folder, str(number)), [way], given.times):
                when = next(whens)
                for what, (children, died) in found.items():
                    deaths += died
                    print(f"{what:45} {when:25} {children:5} children {died:4} deaths", flush=True)
    return int(deaths > 0)


if __name__ == "__main__":
    sys.exit(main())
