"""`python -m diloco_deploy` is the `diloco` command."""

import sys

from diloco_common.command import main

if __name__ == "__main__":
    sys.exit(main())
