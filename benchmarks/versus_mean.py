"""Decoupled DiLoCo in versus.py with `sync.merge=mean`: contributions are merged by their mean, as the peers do it."""

from __future__ import annotations

import sys

from versus_ours import serve, work
from versus_task import Task

if __name__ == "__main__":
    role, number, task = sys.argv[1], int(sys.argv[2]), Task.load(sys.argv[3])
    if role == "service":
        sys.exit(serve(task, number, {"sync.merge": "mean"}))
    work(task, number)
