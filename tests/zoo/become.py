"""`python -m become PATH ARGUMENTS...`: run a script, as `python PATH ARGUMENTS...` does.

For processes that are forked (tests/e2e/forks.py). multiprocessing forbids those to have children, because it ends them
by a handler that children would outlive; and it has them start children as they were started. Here a script has what
Linux gives it: loaders may have workers, and these are forked.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys

if __name__ == "__main__":
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
