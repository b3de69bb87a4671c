"""`python -m diloco_simulator`."""

import sys

from diloco_simulator.cli import main

sys.exit(main())
