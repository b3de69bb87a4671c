"""Eight learners at one site behind a thin link, two shards elsewhere: with and without a mirror of each at the site.

    python tests/faults/mirror_link.py --rate 20mbit --seconds 60

Prints as JSON what crosses the link in each direction for a round and a parameter, the late share, and how fast the run
is. Needs root: the site is a network namespace, and the link is shaped by tc.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from networks import Namespace, run
from steady import SETTINGS, Options, SteadyLearner

from diloco_common.wire.addresses import read_address
from processes import Shard, environment, sets, until, versions

LEARNERS, SHARDS = 8, 2


def link_bytes(namespace: Namespace) -> tuple[int, int]:
    """Up (to the shards) and down."""
    (found,) = json.loads(run("ip", "-s", "-j", "link", "show", namespace._near_device))
    return found["stats64"]["rx"]["bytes"], found["stats64"]["tx"]["bytes"]


def measure(
    rate: str, seconds: float, width: int, sync_every: int, keep: Path | None, *, mirrored: bool
) -> dict[str, Any]:
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as name, Namespace() as namespace:
        folder = Path(name)
        namespace.plug_in()
        given = {
            **SETTINGS, "sync.sync_every": sync_every, "sync.pull": "int8", "sync.push": "int4",
            "sync.grace": "adaptive",
            "lease.lease_s": 30, "lease.heartbeat_s": 3, "security.insecure": True, "shard.count": SHARDS,
        }  # fmt: skip
        shards = [
            Shard(
                f"shard-{i}", {**given, "shard.index": i, "shard.listen": f"{namespace.near}:0"}, folder / f"s{i}"
            )
            for i in range(SHARDS)
        ]  # fmt: skip
        try:
            for shard in shards:
                shard.start()
                processes.append(shard)
            for i, shard in enumerate(shards if mirrored else []):
                file = folder / f"mirror-{i}.json"
                more = {"shard.mirror_of": shard.endpoints.grpc, "run.site": "site", "security.insecure": True}
                more |= {"shard.listen": f"{namespace.far}:0", "shard.http": f"{namespace.far}:0"}
                command = ["nsenter", f"--net=/run/netns/{namespace.name}", sys.executable, "-m", "diloco_server"]
                with (folder / f"mirror-{i}.log").open("w") as log:
                    processes.append(
                        subprocess.Popen(
                            [*command, *sets(more), f"--address-file={file}"],
                            stdout=log, stderr=log, env=environment(),
                        )
                    )  # fmt: skip
                until(lambda file=file: read_address(file), "a mirror")  # type: ignore[misc]
            options = Options(
                namespace=namespace.name,
                width=width,
                step_s=0.05,
                site="site" if mirrored else "",
                longest_wait_s=2.0,
                decay=0.002,
            )
            addresses = ",".join(shard.endpoints.grpc for shard in shards)
            learners = [SteadyLearner(f"w{i}", addresses, folder, options) for i in range(LEARNERS)]
            processes += learners
            for shard in shards:
                until(lambda shard=shard: min(versions(shard.status()).values(), default=0) > 1, "versions")  # type: ignore[misc]
            namespace.thin(rate)
            for shard in shards:
                goal = min(versions(shard.status()).values()) + 2
                until(lambda shard=shard, goal=goal: min(versions(shard.status()).values()) >= goal, "versions")  # type: ignore[misc]
            before, status, began = link_bytes(namespace), [s.status() for s in shards], time.monotonic()
            time.sleep(seconds)  # what is measured
            after, took_s = link_bytes(namespace), time.monotonic() - began
            later = [s.status() for s in shards]
        finally:
            for process in processes:
                process.kill()
            if keep is not None:
                shutil.copytree(folder, keep / str(mirrored), dirs_exist_ok=True)
        parameters = 8 * width + width + width * width + width
        rounds = sum(sum(versions(s).values()) for s in later) - sum(sum(versions(s).values()) for s in status)
        rounds /= SETTINGS["sync.fragments"]
        told = {key: sum(s[key] for s in later) - sum(s[key] for s in status) for key in ("late", "tokens_merged")}
        taken = sum(s["tokens"]["accepted"] for s in later) - sum(s["tokens"]["accepted"] for s in status)
        late = sum(s["tokens"]["late"] for s in later) - sum(s["tokens"]["late"] for s in status)
        return {
            "mirrored": mirrored, "rate": rate, "parameters": parameters, "rounds": round(rounds, 2),
            "up_bytes_per_round_and_parameter": round((after[0] - before[0]) / rounds / parameters, 2),
            "down_bytes_per_round_and_parameter": round((after[1] - before[1]) / rounds / parameters, 2),
            "rounds_per_minute": round(60 * rounds / took_s, 2),
            "merged_tokens_per_s": round(told["tokens_merged"] / SHARDS / took_s, 1),
            "late_share": round(late / max(1, late + taken), 3),
            "loss": round(fmean(one["loss"] for one in later[0]["learners"]), 6),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--width", type=int, default=700)
    parser.add_argument("--sync-every", type=int, default=48)
    parser.add_argument("--keep", type=Path, help="folder for the logs")
    parser.add_argument("--mirrored", action="store_true", help="with a mirror alone")
    args = parser.parse_args()
    for mirrored in (True,) if args.mirrored else (False, True):
        found = measure(args.rate, args.seconds, args.width, args.sync_every, args.keep, mirrored=mirrored)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
