"""Stands in for `diloco_server`: a shard whose work is done. FAKE_SERVER=fails: it cannot start."""

from __future__ import annotations

import os
import sys

from fake_member import Member, arguments

from statuses import learner, shard


def main() -> None:
    args = arguments()
    if os.environ.get("FAKE_SERVER") == "fails":
        sys.exit(4)
    index = int(args.set["shard.index"])
    fragment = {"id": index, "version": 3 + index, "round_open": False}
    status = shard(index, learner("worker-0"), tokens_budget=1000, done=True, fragments=[fragment], rounds=3 + index)
    member = Member(args.set["shard.http"], status)
    member.say_where(args.address_file, "shard", f"shard-{index}")
    member.terminated.wait(60)


if __name__ == "__main__":
    main()
