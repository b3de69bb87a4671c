"""`python -m become PACE PATH ARGUMENTS...`: run a script, as `python PATH ARGUMENTS...` does.

For processes that are forked (tests/forks.py). multiprocessing forbids those to have children, because it ends them
by a handler that children would outlive; and it has them start children as they were started. Here a script has what
Linux gives it: loaders may have workers, and these are forked.

PACE: an inner step of a learner takes so many seconds longer. Those of the zoo take a millisecond or two, those of
models that need several machines a hundred. On a busy machine a round takes as long as a hundred of the former.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
import time
from typing import Any


def keep_pace(pace_s: float) -> None:
    from diloco_worker.learner import Learner

    step = Learner.step

    def paced(*given: Any, **named: Any) -> None:
        step(*given, **named)
        time.sleep(pace_s)

    Learner.step = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    multiprocessing.set_start_method("fork", force=True)
    if float(sys.argv[1]):
        keep_pace(float(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
