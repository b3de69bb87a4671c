"""Stands in for `diloco_demo`. FAKE_WORKER says how it behaves:

ends   has reached the budget once somebody has seen its status
waits  trains until it is told to end
deaf   the same, and ignores SIGTERM
fails  refuses its settings
lost   is refused by the shards after a while
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from fake_member import Member, arguments

from diloco_common.errors import EXIT_REFUSED
from statuses import worker


def main() -> None:
    args = arguments()
    if args.command == "evaluate":
        if os.environ.get("FAKE_EVALUATION") == "fails":
            sys.exit("no shard answers")
        Path(args.export).write_bytes(b"model")
        Path(args.out).write_text(json.dumps({"eval_loss_first": 5.5, "eval_loss_final": 2.25}))
        return
    behaviour = os.environ.get("FAKE_WORKER", "ends")
    if behaviour == "fails":
        print("diloco-worker: no GPU here [BAD_CONFIG]", file=sys.stderr)
        sys.exit(2)
    name, folder = args.set["worker.learner_id"], Path(args.set["worker.folder"])
    status = worker(name, tokens=500, loss=2.5, tokens_per_s=50.0)
    member = Member("127.0.0.1:0", status)
    folder.mkdir(parents=True, exist_ok=True)
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    member.say_where(args.address_file, "worker", name)
    if behaviour in ("waits", "deaf"):
        member.terminated.wait(60)
    else:
        member.answered.acquire(timeout=200)
        if behaviour == "lost":
            sys.exit(EXIT_REFUSED)
    status |= {"state": "done", "tokens": 600}
    Path(args.final_status).write_text(json.dumps(status))


if __name__ == "__main__":
    main()
