"""Stands in for `diloco_server`: a shard whose work is done. FAKE_SERVER=fails: it cannot start."""

from __future__ import annotations

import os
import sys

from fake_member import Member, arguments


def main() -> None:
    args = arguments()
    if os.environ.get("FAKE_SERVER") == "fails":
        sys.exit(4)
    index = int(args.set["shard.index"])
    status = {
        "role": "shard",
        "name": f"shard-{index}",
        "ready": True,
        "tokens_merged": 1000,
        "tokens_budget": 1000,
        "done": True,
        "learners": [{"id": "worker-0", "state": "alive"}],
        "fragments": [{"id": index, "version": 3 + index, "round_open": False}],
        "rounds": 3 + index,
        "participants_mean": 2.0,
        "late": 1,
        "evictions": 0,
        "events": [{"ago_s": 0.0, "event": "joined", "learner": "worker-0", "code": ""}],
        "bytes_pushed": 100,
        "bytes_pulled": 200,
    }
    member = Member(args.set["shard.http"], status)
    member.say_where(args.address_file, "shard", f"shard-{index}")
    member.terminated.wait(60)


if __name__ == "__main__":
    main()
