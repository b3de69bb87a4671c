"""`python -m few_files NUMBER ARGUMENTS...`: a shard that may have so many files open, until it asks for more."""

from __future__ import annotations

import resource
import sys

from diloco_server.cli import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.exit(main(sys.argv[2:]))
