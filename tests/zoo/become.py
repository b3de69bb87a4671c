"""`python -m become PATH ARGUMENTS...`: run a script, as `python PATH ARGUMENTS...` does.

For processes that are forked (tests/e2e/forks.py). multiprocessing forbids those to have children, because it ends them
by a handler that children would outlive. These are ended by their parent's death instead, as in life, and so loaders
may have workers.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys

if __name__ == "__main__":
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
