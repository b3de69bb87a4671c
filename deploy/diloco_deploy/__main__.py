"""`python -m diloco_deploy` is the `diloco` command."""

import sys

from diloco_deploy.cli import main

if __name__ == "__main__":
    sys.exit(main())
