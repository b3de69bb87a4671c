"""`python -m diloco_worker`."""

import sys

from diloco_worker.cli import main

sys.exit(main())
