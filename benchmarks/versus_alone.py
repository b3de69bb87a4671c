"""No system at all in versus.py: each worker trains for itself, and nothing is sent.

So it shows what the machine allows: nobody trains faster, and what stalls these workers is the machine, not a system.
"""

from __future__ import annotations

import sys

from versus_task import Task, Training

if __name__ == "__main__":
    Training(Task.load(sys.argv[3]), rank=int(sys.argv[2])).run()
